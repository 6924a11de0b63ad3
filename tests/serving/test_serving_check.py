# SPDX-License-Identifier: Apache-2.0
"""The question of a user: what each pattern of completions is called, and what is refused before anything is served."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from routeblock.errors import InputError
from routeblock.serving import check, model
from routeblock.serving.completions import Served
from routeblock.serving.kinds import Mode
from routeblock.serving.protocol import load, processes

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = load(ROOT / "fixtures/protocols/serving.json")
SMALL = PROTOCOL.model.model_copy(
    update={"layers": 1, "hidden": 256, "intermediate": 128, "experts": 8, "top_k": 2, "heads": 2, "kv_heads": 1}
)


def rows(native: list[int], canonical: list[int], alone: int, batch: int = 3) -> list[Served]:
    """Completions of one token: by repeat the token of prompt 1; the other prompts never change."""

    def one(alignment: str, repeat: int, prompt: int, token: int, *, lone: bool = False) -> Served:
        ids, value = np.array([token], "<i4").tobytes(), np.array([-1.0], "<f4").tobytes()
        return Served("graphs", alignment, 1, lone, batch, repeat, prompt, ids, value)

    found = []
    for alignment, tokens in (("native", native), ("canonical", canonical)):
        found += [one(alignment, r, p, t if p == 1 else 9) for r, t in enumerate(tokens) for p in range(batch)]
    return found + [one("canonical", 0, p, alone if p == 1 else 9, lone=True) for p in range(batch)]


@pytest.mark.parametrize(
    ("native", "canonical", "alone", "verdict", "reason"),
    [
        ([1, 2, 1], [1, 1, 1], 1, "alignment", "2 different outputs in 3 repeats as it is, 1 with canonical"),
        ([1, 1, 1], [1, 1, 1], 2, "batch", "alone, 1 of 3 completions"),
        ([1, 2, 1], [1, 1, 1], 2, "alignment", "alone, 1 of 3 completions"),
        ([1, 1, 1], [1, 2, 1], 1, "something else", "2 with canonical alignment"),
        ([1, 1, 1], [1, 1, 1], 1, "nothing seen", "1 different outputs in 3 repeats"),
    ],
)
def test_what_was_seen_has_its_name(
    native: list[int], canonical: list[int], alone: int, verdict: str, reason: str
) -> None:
    answer = check.judge(rows(native, canonical, alone), 3)
    assert (answer.verdict, reason in answer.reason) == (verdict, True)


def test_log_probabilities_alone_make_another_output() -> None:
    found = rows([1, 1], [1, 1], 1)
    other = Served(**(vars(found[0]) | {"logprobs": np.array([-2.0], "<f4").tobytes()}))
    assert check.judge([other, *found[1:]], 2).verdict == "alignment"


def configured(tmp_path: Path, **change: object) -> Path:
    document = model.config(SMALL) | change
    (tmp_path / "config.json").write_text(json.dumps(document))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"quantization_config": None}, "quantisation None"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantisation 'fp8'"),
        ({"quantization_config": {"quant_method": "awq", "bits": 8}}, "quantisation 'awq' of 8"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
            "float-quantized",
        ),
        ({"model_type": "llama"}, "model type 'llama'"),
        ({"num_experts": 0}, "without experts"),
    ],
)
def test_a_model_of_another_kind_is_one_line(change: dict[str, object], what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json") as e:
        check.read_config(configured(tmp_path, **change))
    assert what in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_no_configuration_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match="no configuration"):
        check.read_config(tmp_path)


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    def there(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, None) if name == "vllm" else None

    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


def test_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.99.1")
    with pytest.raises(InputError, match=r"vLLM 0.99.1 is not a version that was read; versions 0.20 to 0.33"):
        check.ready()


def test_no_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.24.0")
    with pytest.raises(InputError, match="torch sees no GPU"):
        check.ready()


def test_the_command_refuses_and_writes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    configured(folder)
    out = tmp_path / "out"
    for command in (["check", str(folder), "--out", str(out)], ["record", "--out", str(out)]):
        done = subprocess.run(
            [sys.executable, "-m", "routeblock", "serving", *command], cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "vllm is not installed" in done.stderr
    assert not out.exists()


def test_the_check_serves_one_batch_in_one_mode(tmp_path: Path) -> None:
    config = check.read_config(configured(tmp_path))
    document = check.protocol_for(PROTOCOL, config, batch=5, repeats=4, tokens=8, mode=Mode.EAGER)
    path = tmp_path / "protocol.json"
    path.write_text(json.dumps(document))
    made = load(path)
    repeating = [p for p in processes(made) if p.kind == "repeat"]
    assert [(p.mode, p.alignment, p.alone) for p in repeating] == [
        ("eager", "native", False),
        ("eager", "canonical", True),
    ]
    assert (made.batches, made.repeats, made.completion_tokens) == ((5,), 4, 8)


def test_the_generated_model_is_one_that_vllm_names(tmp_path: Path) -> None:
    digests = model.write(tmp_path / "one", SMALL)
    assert digests == model.write(tmp_path / "two", SMALL)
    index = json.loads((tmp_path / "one/model.safetensors.index.json").read_text())
    names = set(index["weight_map"])
    assert set(index["weight_map"].values()) == set(digests)
    assert "model.layers.0.mlp.experts.7.down_proj.qzeros" in names
    assert "model.layers.0.self_attn.q_norm.weight" in names
    assert len([n for n in names if ".experts." in n]) == 8 * 3 * 3
    with pytest.raises(InputError, match="hidden 200"):
        model.write(tmp_path / "three", SMALL.model_copy(update={"hidden": 200}))
