"""Describes what the bits of a machine depend on: threads, libraries, and a digest of a small sample of computations.

Members with the same words compute the same bits, as far as a sample can tell; see docs/decisions/17.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

MACHINE_SETTINGS = ("libraries", "number of threads", "processor (digest of what it computes)")
"""Names of the settings of a machine. Members are told the first that differs, in this order, which is alphabetical."""

_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def machine_words() -> dict[str, str]:
    """Returns the settings of this machine and process that must be the same on all members for equal bits."""
    torch = sys.modules.get("torch")
    digest = hashlib.sha256(numpy_probe())
    libraries = f"numpy {np.__version__}"
    if torch is not None:
        digest.update(torch_probe(torch))
        libraries += f", torch {torch.__version__}"
        for kind in ("cuda", "xpu"):
            device = getattr(torch, kind, None)
            if device is not None and device.is_initialized():  # the script uses it
                libraries += f" on {device.get_device_name()}"
    return dict(zip(MACHINE_SETTINGS, (libraries, _threads(torch), digest.hexdigest()[:16]), strict=True))


def numpy_probe() -> bytes:
    """Returns a digest of products, elementary functions and sums in NumPy; no size is a multiple of a register."""
    digest = hashlib.sha256()
    for dtype in (np.float32, np.float64):
        x, w = _numbers(1, (61, 257), dtype), _numbers(2, (257, 131), dtype)
        y = np.tanh(x @ w / 16)
        p = np.exp(y - y.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        loss = -np.log(p[:, 7]).mean()
        dx = p @ w.T
        dw = x.T @ p
        step = dw / (np.sqrt(dw * dw) + 1e-8)
        for found in (y, p, loss, dx, dw, step, np.sqrt(np.float64(dw.reshape(-1) @ dw.reshape(-1)))):
            digest.update(np.ascontiguousarray(found).tobytes())
    return digest.digest()


def torch_probe(torch: Any) -> bytes:
    """Returns a digest of a forward and backward pass through common layers on the CPU; draws no random number."""
    functional = torch.nn.functional
    digest = hashlib.sha256()

    def leaf(seed: int, *shape: int) -> Any:
        return torch.from_numpy(_numbers(seed, shape, np.float32)).requires_grad_()

    leaves = [leaf(3, 5, 3, 17, 17), leaf(4, 13, 3, 3, 3), leaf(5, 13), leaf(6, 37, 13 * 15 * 15), leaf(7, 37)]
    with torch.enable_grad():
        x, kernel, bias, weight, scale = leaves
        y = functional.gelu(functional.conv2d(x, kernel, bias))
        y = functional.batch_norm(y, None, None, training=True)
        y = functional.layer_norm(functional.linear(y.flatten(1), weight), (37,), scale)
        attended = functional.scaled_dot_product_attention(y[None], y[None], y[None])[0]
        loss = functional.cross_entropy(attended.tanh() + y, torch.arange(5))
        gradients = torch.autograd.grad(loss, leaves)
    for found in (loss, *gradients):
        digest.update(found.detach().contiguous().numpy().tobytes())
    return digest.digest()


def _threads(torch: Any) -> str:
    """Returns the number of threads of NumPy's products, and of torch if that differs."""
    given = next((value for name in _THREADS if (value := os.environ.get(name))), None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ours = f"{cores} (all cores: set OMP_NUM_THREADS)" if given is None else given
    theirs = ours if torch is None else str(torch.get_num_threads())
    return ours if theirs == ours else f"{ours}, torch {theirs}"


def _numbers(seed: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Returns numbers from -1 to 1, the same with every version of NumPy."""
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(int(np.prod(shape)))
    return ((bits >> np.uint64(40)).astype(np.float64) / 2**23 - 1).astype(dtype).reshape(shape)
