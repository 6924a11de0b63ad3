from pathlib import Path

from routeblock.workflow import code, prepare

CONFIG = prepare(config, Path("results"))
