# SPDX-License-Identifier: Apache-2.0
"""Launching our cubins with cuda-core: buffers, kernels, graphs, events. Neither torch nor vllm is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeblock.cuda.nvrtc import cubin_architecture
from routeblock.errors import InputError

Launch = Callable[[Any], None]  # enqueues work on the stream, or on the graph under construction, that it is given


class Gpu:
    """One CUDA device with a stream of its own.

    Raises InputError if cuda-core is missing, the device does not exist, or (`load`) a cubin is for another
    architecture.
    """

    def __init__(self, index: int) -> None:
        try:
            from cuda import core
            from cuda.bindings import driver
        except ImportError as e:
            raise _refused(f"cuda-core cannot be imported: {e}", "lane cuda", "envs/cuda13.txt is needed") from e
        self._core, self._driver = core, driver
        try:
            self.device = core.Device(index)
            self.device.set_current()
        except Exception as e:  # cuda-core raises its own error, and ValueError for an index out of range
            raise _refused(f"no CUDA device {index}: {e}", "lane cuda", "a device that the driver lists") from e
        self.stream = self.device.create_stream()
        self._events: list[Any] = []

    @property
    def architecture(self) -> str:
        major, minor = self.device.compute_capability
        return f"sm_{major}{minor}"

    @property
    def l2_bytes(self) -> int:
        return int(self.device.properties.l2_cache_size)

    @property
    def multiprocessors(self) -> int:
        return int(self.device.properties.multiprocessor_count)

    def load(self, cubin: Path, names: tuple[str, ...]) -> dict[str, Any]:
        """The kernels `names` of a cubin made for this device's architecture."""
        made_for = cubin_architecture(cubin.read_bytes())
        if made_for != self.architecture:
            raise _refused(
                f"a cubin for {made_for}", str(cubin), f"this device is {self.architecture}", "build it for this device"
            )
        code = self._core.ObjectCode.from_cubin(cubin.read_bytes())
        return {name: code.get_kernel(name) for name in names}

    def allocate(self, size: int) -> Any:
        """A buffer of `size` bytes (at least one)."""
        return self.device.allocate(max(size, 1), stream=self.stream)

    def upload(self, array: NDArray[Any]) -> Any:
        """A buffer with the bytes of `array`."""
        array = np.ascontiguousarray(array)
        buffer = self.allocate(array.nbytes)
        self.stream.sync()  # the copy is not of this stream, the allocation is
        if array.nbytes:
            self._check(self._driver.cuMemcpyHtoD(int(buffer.handle), array.ctypes.data, array.nbytes))
        return buffer

    def download(self, buffer: Any, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """The contents of `buffer`, after all work of the stream."""
        self.stream.sync()
        array = np.empty(shape, dtype)
        if array.nbytes:
            self._check(self._driver.cuMemcpyDtoH(array.ctypes.data, int(buffer.handle), array.nbytes))
        return array

    def fill(self, buffer: Any, byte: int) -> None:
        """Set every byte of `buffer`."""
        buffer.fill(byte, stream=self.stream)

    def bind(self, kernel: Any, grid: tuple[int, int, int], block: tuple[int, int, int], *arguments: Any) -> Launch:
        """One launch of `kernel`; buffers go as pointers, Python integers as C int."""
        config = self._core.LaunchConfig(grid=grid, block=block)
        passed = [ctypes.c_int(a) if isinstance(a, int) else a for a in arguments]
        return lambda where: self._core.launch(where, config, kernel, *passed)

    def mark(self, event: Any) -> Launch:
        """Record `event` at this place of a graph, on the device: no host time lies between it and its neighbours."""
        external = self._driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL.value

        def record(builder: Any) -> None:
            stream = builder.stream
            self._check(self._driver.cuEventRecordWithFlags(int(event.handle), int(stream.handle), external))

        return record

    def graph(self, launches: list[Launch]) -> Any:
        """`launches` captured one after another, ready to run."""
        builder = self.device.create_graph_builder().begin_building()
        for launch in launches:
            launch(builder)
        graph = builder.end_building().complete()
        graph.upload(self.stream)
        return graph

    def events(self, count: int) -> list[Any]:
        """`count` timing events, the same at every call: making one takes longer than a short kernel."""
        while len(self._events) < count:
            self._events.append(self.device.create_event(self._core.EventOptions(timing_enabled=True)))
        return self._events[:count]

    def microseconds(self, start: Any, end: Any) -> float:
        """Time between two events, after waiting for the second."""
        end.sync()
        return float(end - start) * 1000.0

    def memory_in_use(self) -> int:
        """Bytes in use on the whole device: the context, our buffers, and whatever else runs there."""
        status, free, total = self._driver.cuMemGetInfo()
        self._check((status,))
        return int(total) - int(free)

    def _check(self, result: tuple[Any, ...]) -> None:
        if int(result[0]):
            raise RuntimeError(f"CUDA driver: {result[0]}")


def _refused(what: str, where: str, limit: str, way_out: str = "run lane cpu, or mend the environment") -> InputError:
    return InputError(what, where=where, limit=limit, way_out=way_out)
