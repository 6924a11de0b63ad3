# SPDX-License-Identifier: Apache-2.0
"""`routeblock predict` as a user asks it: options, files, verdicts, exit codes, refusals in one line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from routeblock.cli import main
from routeblock.diagnose.answer import load_answer
from routeblock.diagnose.routings import draw
from routeblock.route_block.fixtures.published_geometry import draw_routing

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "fixtures/models/qwen3.5-35B-A3B.config.json"
SIZES = {"--hidden": "2048", "--intermediate": "768", "--top-k": "8", "--group-size": "128", "--dtype": "float16"}
LAYER = [word for pair in SIZES.items() for word in pair] + ["--zero-points"]
STUDY = [*LAYER, "--experts", "128"]


def ask(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["predict", "--json", "-", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def study(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    return ask(*STUDY, *arguments, capsys=capsys)


def fact(answer: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (f for f in answer["facts"] if f["name"] == name)
    return dict(found)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routing") / "topk_ids.npy"
    np.save(path, draw_routing(np.random.default_rng(0)))
    return path


def test_the_published_routing_parts_expert_106_alone(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = study("--gpu", "RTX 3090", "--vllm", "0.24.0", "--routing", published, capsys=capsys)
    assert (code, answer["verdict"]) == (1, "can differ")
    ((part,),) = answer["detail"]["partition"]
    (expert,) = part["parted_experts"]
    assert (expert["expert"], expert["blocks"], len(expert["routes"])) == (106, [40, 41], 11)
    assert {51, 86, 22, 28} <= set(expert["routes"])
    assert expert["classes"]["w13"] == 2
    assert (part["blocks"], part["gemms"]["w13"]["direct_tiles"], part["gemms"]["w13"]["split_tiles"]) == (50, 492, 108)
    assert part["gemms"]["w13"]["first_split"] == [41, 0]
    assert answer["detail"]["runs"]["outcomes_at_most"] == "165"  # 11 routes, 8 of them in the first block
    assert fact(answer, "launch of W13")["value"] == [64, 128, 246]
    assert fact(answer, "launch of W13")["source"] == "derived"


def test_canonical_order_and_full_k_stop_it_between_runs(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--canonical", "--full-k"):
        code, answer = study("--gpu", "RTX 3090", "--vllm", "0.24.0", "--routing", published, option, capsys=capsys)
        assert (code, answer["verdict"]) == (0, "cannot differ")


def test_the_grid_of_the_study_that_keeps_full_k_stops_it_too(
    published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer = study(
        "--gpu", "RTX 3090", "--vllm", "0.24.0", "--routing", published, "--launch", "64,128,200", capsys=capsys
    )
    assert code == 0
    assert "all blocks of each are cut alike" in answer["reason"]
    assert fact(answer, "launch of W2")["source"] == "given"


def test_few_routes_over_few_experts_are_aligned_in_a_fixed_order(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {}
    for experts, tokens in ((32, 127), (32, 128), (65, 60)):
        options = ["--experts", experts, "--tokens", tokens, "--gpu", "H200", "--vllm", "0.24.0"]
        code, answer = ask(*LAYER, *options, capsys=capsys)
        codes[experts, tokens] = code, answer["detail"]["runs"]["order"]
    assert codes[32, 127] == (0, "fixed")
    assert {codes[32, 128][1], codes[65, 60][1]} == {"by arrival"}


def test_a_tokens_class_follows_the_batch_until_thread_k_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = study(
        "--gpu", "H200", "--vllm", "0.24.0", "--tokens", 21, "--between", "batches",
        *(word for size in ("1", "16", "64", "257") for word in ("--batches", size)), capsys=capsys,
    )  # fmt: skip
    assert (code, answer["verdict"]) == (1, "can differ")
    stops = {o["option"].split(" (")[0]: o["batches"] for o in answer["detail"]["options"]}
    assert stops["canonical alignment"] is False
    assert stops["full K"] is False  # with the block size the warps along K change
    assert stops["full K with thread_k held at 64"] is True
    assert answer["cure"] == "full K with thread_k held at 64"


def test_kernels_without_a_twin_are_not_answered_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = study("--gpu", "H200", "--vllm", "0.33.0", "--tokens", 21, capsys=capsys)
    assert (code, answer["verdict"]) == (4, "cannot say")
    assert "Humming" in answer["reason"]
    code, answer = study("--gpu", "H200", "--vllm", "0.24.0", "--batch-invariant", "--tokens", 21, capsys=capsys)
    assert (code, answer["sentence"]) == (4, "vLLM refuses to load the layer")
    code, answer = study("--gpu", "H200", "--vllm", "0.33.0", "--moe-backend", "marlin", "--tokens", 21, capsys=capsys)
    assert code in (0, 1)
    assert fact(answer, "launch of W13")["value"] == [64, 128, 528]


def test_a_launch_that_cannot_be_derived_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = study("--gpu", "B200", "--vllm", "0.33.0", "--tokens", 21, capsys=capsys)
    assert code == 4
    assert "cannot derive" in answer["reason"]


def test_a_public_models_config_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", CONFIG, "--group-size", 128, "--zero-points", "--gpu", "L40S", "--vllm", "0.33.0"]
    code, answer = ask(*options, "--tokens", 3000, capsys=capsys)
    assert code == 1
    assert answer["detail"]["layer"] == {
        "hidden": 2048, "intermediate": 512, "experts": 256, "top_k": 8, "dtype": "bfloat16", "group_size": 128,
        "zero_points": True, "layout": "AutoAWQ",
    }  # fmt: skip


def gptq(folder: Path, **settings: Any) -> Path:
    config = json.loads(CONFIG.read_bytes())
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, **settings}
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "quantization_config": quantization}))
    return path


def test_of_a_gptq_model_the_settings_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_out = {r"-:.*self_attn.*": {}, r"-:.*shared_expert.*": {}}
    options = ["--gpu", "L40S", "--vllm", "0.33.0", "--tokens", 3000]
    code, answer = ask("--model", gptq(tmp_path, dynamic=left_out), *options, capsys=capsys)
    assert code == 1
    layer = answer["detail"]["layer"]
    assert (layer["group_size"], layer["zero_points"], layer["layout"]) == (128, False, "GPTQ or compressed-tensors")
    _, same = ask("--model", CONFIG, "--group-size", 128, "--symmetric", *options, capsys=capsys)
    assert same["detail"] == answer["detail"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"desc_act": True}, "desc_act true"),
        ({"sym": False}, "the fixed zero point alone"),
        ({"dynamic": {r"+:.*experts.*": {"bits": 8}}}, "bits 8"),
    ],
)
def test_gptq_that_marlin_runs_otherwise_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], words: str
) -> None:
    options = ["--gpu", "L40S", "--vllm", "0.33.0", "--tokens", "8"]
    assert main(["predict", "--model", str(gptq(tmp_path, **settings)), *options]) == 2
    assert words in capsys.readouterr().err


def test_tensor_and_expert_parallel_ranks_change_what_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "H100 SXM", "--vllm", "0.24.0", "--tokens", 128]
    _, whole = study(*options, capsys=capsys)
    _, shared = study(*options, "--tp", 2, capsys=capsys)
    _, spread = study(*options, "--ep", 8, capsys=capsys)
    assert [a["detail"]["layer"]["intermediate"] for a in (whole, shared)] == [768, 384]
    assert (
        whole["detail"]["partition"][0][0]["gemms"]["w13"]["n_tiles"]
        == 2 * (shared["detail"]["partition"][0][0]["gemms"]["w13"]["n_tiles"])
    )
    ((*ranks,),) = spread["detail"]["partition"]
    assert [r["rank"] for r in ranks] == [*range(8)]
    assert sum(r["routes"] for r in ranks) == 1024
    assert [fact(a, "block size")["value"] for a in (whole, spread)] == [16, 64]
    _, newer = study("--gpu", "H100 SXM", "--vllm", "0.26.0", "--tokens", 128, "--ep", 8, capsys=capsys)
    assert fact(newer, "block size")["value"] == 16


def test_chunks_and_graphs_change_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu", "A100", "--vllm", "0.24.0", "--tokens", 300]
    _, chunks = study(*options, "--chunk", 128, capsys=capsys)
    assert chunks["detail"]["runs"]["routings"] == 3
    _, padded = study(*options, "--graph-size", 256, "--graph-size", 512, capsys=capsys)
    assert padded["detail"]["partition"][0][0]["tokens"] == 512
    assert fact(padded, "routes of the padding")["source"] == "assumed"
    code = main(["predict", *STUDY, *map(str, options), "--graph-size", "512", "--strict"])
    assert code == 2
    assert "routes of the padding uniform is assumed" in capsys.readouterr().err


def test_a_routing_is_read_from_each_kind_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = draw(30, 8, 128, 7, 3)
    np.save(tmp_path / "a.npy", ids)
    save_file({"topk_ids": ids.astype(np.int64)}, tmp_path / "a.safetensors")
    columns: dict[str, Any] = {"routing": np.repeat([4, 9, 2], 30)}
    columns |= {f"slot{s}": ids.reshape(-1, 8)[:, s] for s in range(8)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    options = ["--gpu", "A10", "--vllm", "0.24.0", "--routing"]
    answers = [study(*options, tmp_path / f"a.{s}", capsys=capsys) for s in ("npy", "safetensors", "parquet")]
    assert len({json.dumps([code, a["detail"]["runs"]], sort_keys=True) for code, a in answers}) == 1
    assert answers[0][1]["detail"]["runs"]["routings"] == 3


def test_ten_thousand_routings_of_the_studys_size_take_a_second_or_two(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    _, answer = study("--gpu", "RTX 3090", "--vllm", "0.24.0", "--tokens", 21, "--routings", 10_000, capsys=capsys)
    assert answer["detail"]["runs"]["routings"] == 10_000
    assert time.process_time() - begin < 8  # of 10 s on 2 cores; about one on an idle core


def test_the_answer_is_sealed_and_names_its_inputs(
    tmp_path: Path, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answer.json"
    options = [*STUDY, "--gpu", "RTX 3090", "--vllm", "0.24.0", "--routing", published, "--out", out, "--exit-zero"]
    assert main(["predict", *map(str, options)]) == 0
    assert load_answer(out)["verdict"] == "can differ"
    manifest = json.loads((tmp_path / "answer.manifest.json").read_bytes())
    assert [Path(i["path"]).name for i in manifest["inputs"]] == ["topk_ids.npy"]
    assert capsys.readouterr().out.startswith("verdict: can differ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "8", "--gpu", "RTX 3091"], "use RTX 3090"),
        (["--gpu", "A10"], "neither --routing nor --tokens"),
        (["--tokens", "8", "--gpu", "A10", "--vllm", "nightly"], "a released version such as 0.24.0"),
        (["--tokens", "8", "--gpu", "A10", "--tp", "5"], "use --tp"),
        (["--tokens", "8", "--gpu", "A10", "--ep", "3"], "every rank has as many experts"),
        (["--tokens", "8", "--gpu", "A10", "--launch", "64,128"], "write it as 64,128,246"),
        (["--tokens", "8", "--gpu", "A10", "--batches", "9-2"], "write the smaller size first"),
        (["--tokens", "8", "--gpu", "A10", "--between", "days"], "'days' is not one of 'runs', 'batches'"),
        (["--tokens", "8", "--gpu", "A10", "--group-size", "48"], "the kernel takes -1, 32, 64, 128"),
        (["--routing", "gone.npy", "--gpu", "A10"], "gone.npy: no such file"),
        (["--tokens", "999999999", "--gpu", "A10"], "at most 1,048,576 tokens"),
        (["--tokens", "8", "--gpu", "A10", "--launch", "96,128,4"], "choose thread sizes that divide the shape"),
        (["--tokens", "8", "--gpu", "A10", "--token", "5000", "--between", "batches"], "do not hold it"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    version = [] if "--vllm" in options else ["--vllm", "0.24.0"]
    assert main(["predict", *STUDY, *version, *options]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert words in line


def test_640_in_two_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--hidden 2048 --intermediate 640 --experts 8 --top-k 2 --group-size 128 --zero-points --dtype float16"
    code = main(["predict", *options.split(), "--gpu", "A10", "--vllm", "0.24.0", "--tokens", "8", "--tp", "2"])
    assert code == 2
    assert "640 split in 2 = 320" in capsys.readouterr().err
