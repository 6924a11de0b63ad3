# SPDX-License-Identifier: Apache-2.0
"""Study A's figures show what prediction, score, surfaces and tables hold, and refuse what does not fit together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from synthetic import Study, make_study

from routeblock.errors import InputError
from routeblock.evidence.digest import canonical_json
from routeblock.evidence.tensors import load_tensors, save_tensors
from routeblock.figure_style import identity, look
from routeblock.moe.launches import Launch
from routeblock.route_block import tables
from routeblock.route_block.document_tables import write as write_table
from routeblock.route_block.facts import CELLS, SURFACES
from routeblock.route_block.figures import trajectories as figure_trajectories
from routeblock.route_block.figures.draw import FIGURES, Given, differences, partition
from routeblock.route_block.fixtures.fixture import load_fixture
from routeblock.route_block.operating_point import cut

PUBLISHED = Path(__file__).resolve().parents[2] / "fixtures" / "published" / "route_block.json"
PLACE = ("twin-hopper", "published", "stored")
POINT = ("small", "published")


def _scored(study: Study) -> Given:
    """The study's score beside its runs, and the table of its differences."""
    out = study.runs / "score.json"
    study.score(out)
    write_table(tables.TABLES["differences"], [out], PUBLISHED, study.runs / "tables")
    write_table(tables.TABLES["trajectories"], [out], PUBLISHED, study.runs / "tables")
    return Given([out], table=study.runs / "tables/differences.parquet")


@pytest.fixture(scope="module")
def given(sound: Study, tmp_path_factory: pytest.TempPathFactory) -> Given:
    return _scored(sound.copy(tmp_path_factory.mktemp("given") / "study"))


def _marks(figure: Figure, kind: str) -> dict[str, Any]:
    """The artists of a figure whose name begins with `kind`."""
    with look():
        figure.draw_without_rendering()
    return {gid: a for a in figure.findobj() if (gid := str(a.get_gid())).startswith(f"{kind}/")}


def _drawn(read: Callable[[Given], Any], given: Given) -> Figure:
    with look():
        figure = read(given)[0]()
    assert isinstance(figure, Figure)
    return figure


def _given_for(name: str, sound: Study, given: Given) -> Given:
    if name == "partition":
        return Given([sound.prediction], fixtures=[sound.fixture])
    return given if name == "differences" else Given([given.documents[0].parent / "tables/trajectories.parquet"])


@pytest.mark.parametrize("name", list(FIGURES))
def test_figures_are_equal_when_made_twice_and_say_their_names(
    name: str, sound: Study, given: Given, tmp_path: Path, words: Callable[[Path], str]
) -> None:
    for out in ("a", "b"):
        FIGURES[name].write(_given_for(name, sound, given), tmp_path / out)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == [f"{name}.manifest.json", f"{name}.png", f"{name}.svg"]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    told = words(tmp_path / "a" / f"{name}.svg")
    wanted = {
        "partition": ["W13, native, grid 4", "W2, full_k, grid 3", "MoE block", "small, point published"],
        "differences": ["W13", "activation", "final", "published 7", "published 10", "published 1"],
        "trajectories": [*CELLS, "W13", "activation", "W2", "final"],
    }
    assert all(text in told for text in wanted[name]), told


def test_the_pieces_of_a_partition_are_its_tiles(sound: Study) -> None:
    pieces = _marks(_drawn(partition, Given([sound.prediction], fixtures=[sound.fixture])), "tiles")
    fixture = load_fixture(sound.fixture)
    blocks = fixture.plans["H0"].num_blocks
    told = json.loads(sound.prediction.read_bytes())
    for gemm in ("w13", "w2"):
        for cell, grid in (("native", told["launches"][gemm][2]), ("full_k", told["full_k_grid"])):
            wanted: Counter[int] = Counter()
            found = cut(fixture.spec, gemm, blocks, Launch(*told["launches"][gemm])._replace(grid=grid))
            for b in range(blocks):
                for n in range(found.n_tiles):
                    direct = b * found.n_tiles + n < found.direct_tiles
                    wanted[0 if direct else min(3, len(found.slices(b, n)))] += 1
            drawn = {
                kind: _area(pieces[name])
                for kind in range(4)
                if (name := identity("tiles", *POINT, gemm, cell, kind)) in pieces
            }
            assert drawn == {kind: n for kind, n in wanted.items() if n}


def _area(patch: PathPatch) -> float:
    corners = np.asarray(patch.get_path().vertices).reshape(-1, 5, 2)
    return float(np.ptp(corners, axis=1).prod(axis=1).sum())


def test_the_exchanged_routes_stand_at_their_blocks(sound: Study) -> None:
    routes = _marks(_drawn(partition, Given([sound.prediction], fixtures=[sound.fixture])), "routes")
    fixture = load_fixture(sound.fixture)
    home = fixture.plans["H0"].block_of()
    for kind, pair in (("across", fixture.pairs.across), ("within", fixture.pairs.within)):
        assert pair is not None
        line = routes[identity("routes", *POINT, "stored", kind)]
        assert set(map(int, line.get_xdata())) == {int(home[r]) for r in pair}


def test_every_differing_element_has_its_mark_and_no_other(given: Given) -> None:
    marks = _marks(_drawn(differences, given), "elements")
    runs = given.documents[0].parent
    both = [load_tensors(runs / f"native/{h}/rep1/tensors.safetensors") for h in ("H0", "H1")]
    found = {s: np.argwhere(both[0][s].view(np.uint16) != both[1][s].view(np.uint16)) for s in SURFACES}
    assert all(len(x) for x in found.values())
    drawn: dict[str, list[tuple[int, int]]] = {s: [] for s in SURFACES}
    for name, line in marks.items():
        surface, row = name.split("/")[-2:]
        width = both[0][surface].shape[1]
        drawn[surface] += [(int(row), round(x * width - 0.5)) for x in line.get_xdata()]
    assert {s: sorted(x) for s, x in drawn.items()} == {s: [tuple(map(int, e)) for e in x] for s, x in found.items()}


def test_equal_bits_stand_on_one_track(given: Given) -> None:
    source = given.documents[0].parent / "tables/trajectories.parquet"
    rows = pq.read_table(source).to_pylist()
    with look():
        figure = figure_trajectories.draw(rows)
    dots = _marks(figure, "bits")
    assert len(dots) == len(rows) * len(SURFACES)
    for surface in SURFACES:
        place: dict[str, set[float]] = {}
        for row in rows:
            name = identity("bits", *PLACE, row["cell"], row["history"], surface, row[surface], row["replicates"])
            place.setdefault(row[f"{surface}_sha256"], set()).add(float(dots[name].get_xdata()[0]))
        assert all(len(x) == 1 for x in place.values())
        assert len({x for xs in place.values() for x in xs}) == len(place)


def test_an_arm_that_did_not_repeat_itself_has_a_dot_an_outcome(given: Given) -> None:
    assert figure_trajectories.tracks("A x3 + Z1 x2", 5) == [("A", 3), ("Z1", 2)]
    assert figure_trajectories.tracks("B", 5) == [("B", 5)]
    (row, *_) = pq.read_table(given.documents[0].parent / "tables/trajectories.parquet").to_pylist()
    with look():
        figure = figure_trajectories.draw([row | {"w13": "A x3 + B x2"}])
    names = [name for name in _marks(figure, "bits") if "/w13/" in name]
    assert [name.split("/")[-2:] for name in names] == [["A", "3"], ["B", "2"]]


def test_a_study_whose_histories_share_a_plan_says_that_nothing_differs(
    tmp_path: Path, words: Callable[[Path], str]
) -> None:
    study = make_study(tmp_path / "study", one_plan=True)
    given = _scored(study)
    svg, _ = FIGURES["differences"].write(given, tmp_path / "out")
    assert words(svg).count("no row may differ, and none does") == len(SURFACES)
    assert "H0 and H1 differ in 0 other routes" in words(
        FIGURES["partition"].write(Given([study.prediction], fixtures=[study.fixture]), tmp_path / "out")[0]
    )


def test_several_fixtures_are_named_and_kept_apart(given: Given) -> None:
    rows = pq.read_table(given.documents[0].parent / "tables/trajectories.parquet").to_pylist()
    with look():
        figure = figure_trajectories.draw([*rows, *(row | {"fixture": "other"} for row in rows)])
    told = [t.get_text() for t in figure.findobj() if _is_text(t)]
    heads = [f"twin-hopper, published, stored plans, {name}: computed" for name in ("small", "other")]
    assert [text for text in told if text.startswith("twin-hopper")] == heads


def test_no_lane_is_said(tmp_path: Path, words: Callable[[Path], str]) -> None:
    with look():
        assert "no lane is configured" in {t.get_text() for t in figure_trajectories.draw([]).findobj() if _is_text(t)}


def _is_text(artist: Any) -> bool:
    return hasattr(artist, "get_text")


def test_surfaces_that_were_not_scored_are_refused(given: Given, tmp_path: Path, sound: Study) -> None:
    study = sound.copy(tmp_path / "study")
    mine = _scored(study)
    path = study.runs / "native/H1/rep1/tensors.safetensors"
    tensors = {name: x.copy() for name, x in load_tensors(path).items()}
    tensors["w13"].view(np.uint16)[0, 0] ^= 1
    save_tensors(path, tensors)
    with pytest.raises(InputError, match="w13 of native/H1 is not what was scored"):
        differences(mine)


def test_a_count_that_is_not_the_tables_is_refused(given: Given, tmp_path: Path) -> None:
    assert given.table is not None
    table = pq.read_table(given.table)
    rows = table.to_pylist()
    row = next(r for r in rows if r["quantity"] == "elements that differ" and r["surface"] == "w2")
    row["measured_number"] += 1
    changed = tmp_path / "differences.parquet"
    pq.write_table(table.from_pylist(rows, schema=table.schema), changed)
    with pytest.raises(InputError, match="elements of w2 differ, and the table has another number"):
        differences(Given(given.documents, table=changed))
    with pytest.raises(InputError, match="no table"):
        differences(Given(given.documents))


def test_a_prediction_that_counted_otherwise_is_refused(sound: Study, tmp_path: Path) -> None:
    told = json.loads(sound.prediction.read_bytes())
    told["arms"][0]["split_routes"]["w13"] += 1
    changed = tmp_path / "prediction.json"
    changed.write_bytes(canonical_json(told))
    with pytest.raises(InputError, match=r"routes in split blocks of w13, native/H0.*the prediction has"):
        partition(Given([changed], fixtures=[sound.fixture]))
    with pytest.raises(InputError, match="it is of fixture"):
        partition(Given([sound.prediction]))
    with pytest.raises(InputError, match="another document"):
        partition(Given([sound.fixture / "fixture.json"], fixtures=[sound.fixture]))
    del told["launches"]
    changed.write_bytes(canonical_json(told))
    with pytest.raises(InputError, match="it lacks launches"):
        partition(Given([changed], fixtures=[sound.fixture]))


def test_the_columns_are_the_tables() -> None:
    for name, columns in (("trajectories", figure_trajectories.COLUMNS),):
        assert set(columns) <= {c.name for c in tables.TABLES[name].columns}
