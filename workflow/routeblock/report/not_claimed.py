# SPDX-License-Identifier: Apache-2.0
"""What is not claimed: the lines that both source documents draw, and those of this product, for report and docs."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One thing that is not claimed, and what there is beyond it here, if anything."""

    text: str
    beyond: str = ""


NOT_CLAIMED: dict[str, tuple[Line, ...]] = {
    "Study A, as its source has it": (
        Line(
            "Counts of elements describe the one fixture. They are no estimate of how often this happens or of what it "
            "does to a model's output."
        ),
        Line(
            "H1 is a composite treatment. Allocation, fragmentation, addresses, prewarming or a named behaviour of an "
            "allocator are not told apart as the cause.",
            "Table history shows that it shifts the native plans on one machine, not what of it does.",
        ),
        Line("That the grid of full-K tiles makes W13 equal does not isolate one instruction or one addition."),
        Line("Nor does it imply that the final outputs are equal."),
        Line(
            "Canonical order is a third trajectory of bits. It recovers no native outcome.",
            "What it costs is in table alignment_cost.",
        ),
        Line(
            "The exchanged routes were chosen from earlier data. That two memberships suffice in this fixture does not "
            "make them necessary, nor the only ones."
        ),
        Line("Times of the processes are operational telemetry, never analysed as performance."),
        Line("The cost of canonical order has no general label of performance: ratios and margins stand as they are."),
    ),
    "Study B, as its source has it": (
        Line(
            "What a band does and what sorting does cannot be told apart in the published arms.",
            "The arm expert_sorted sorts without bands: tables discovery, beyond_study and schedule_counters have it.",
        ),
        Line("These are times of one synthetic operator: no tokens per second, no latency of a model."),
        Line("No gain over the batched MoE of an existing engine is established.", "Table peers times two engines."),
        Line("A schedule changes which work is assigned where, not the hardware's scheduler of warps."),
        Line("A pool bound is not a number of distinct experts, and pool 256 is no control without reuse."),
        Line("The sanitizer ran over small fixtures. Large batches were not covered exhaustively."),
        Line("Intervals describe repetitions on one device: no other workload, host or future request."),
        Line("Routing on the CPU, serving queues and the execution of whole models are outside the scope."),
        Line(
            "That the cache is the cause was not established: no counter could be read.",
            "Table schedule_counters has counters of one H200; where the saved reads are small, the cause stays open.",
        ),
        Line(
            "It is no general detector of reuse, and no runtime is promoted: small batches and the paired path get "
            "slower there, and even a high overlap of experts does not guarantee a win.",
            "Here the sign at 16 slots depends on the shape.",
        ),
        Line("No attention kernel, model output, throughput of inference or production scheduler was qualified."),
    ),
    "This product": (
        Line("The default layer is synthetic. It has the published geometry and is not the published checkpoint."),
        Line("That other bits are worse bits: no quality of any output was judged."),
        Line(
            "Study A shows the effect of injected plans, in most studies plans that the fixture's author drew so that "
            "they would show it."
        ),
        Line("The native alignment did not repeat itself on the GPU: replay stands for native in the relations there."),
        Line("Lane twin-ampere is modelled. It was never compared with such a GPU by us."),
        Line("The launch of W2 at the published point is an assumption: the source prints that of W13."),
        Line("One machine recorded the history, the operator and the counters. Others may give other plans."),
        Line("The paired incumbent and the dot product of study B are reconstructions: no evidence of the original's."),
        Line("Times are of these devices: the same shapes do not ask the same of a chip with another cache or clock."),
        Line("Lane cpu of study B says nothing of a GPU."),
        Line("Seals do not prove who made a file: they show that it is the one its producer sealed, and from what."),
        Line(
            "The digest of the code is what the code that ran stated. Records and seals are held against the frozen "
            "one; the scorer does not read the code itself."
        ),
        Line(
            "Completions are those of a generated model with random weights. That they diverge is observed; how often, "
            "and after how many tokens, is that model's."
        ),
        Line("Why a completion depends on the batch with canonical alignment on was not traced to a kernel."),
        Line("Launched one by one from Python, short kernels show the host. A host that launches faster shows less."),
    ),
}
