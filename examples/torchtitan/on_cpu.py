"""Runs torchtitan 0.3 on CPUs, and replaces what it cannot do there; its files stay as they are.

    paceline run -n 4 --replica-size 2 --min 1 --restarts 3 examples/torchtitan/on_cpu.py --module llama \
        --config debugmodel --training.seq_len 64 --training.local_batch_size 4 --training.global_batch_size 16

Two replicas with FSDP 2; `--parallelism.tensor_parallel_degree 2` behind it makes it TP 2, and `--microbatches 4` gives
the same bits whatever dies. You may kill any process. On GPUs it is `-m torchtitan.train` in place of this file.
"""

import types

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

# torchtitan asks torch which accelerator there is, and takes CUDA if there is none; and its metrics ask for memory.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.empty_cache = lambda: None
torch.cpu.get_device_name = lambda device: "CPU"
torch.cpu.get_device_properties = lambda device: types.SimpleNamespace(total_memory=1 << 30)
torch.cpu.memory_stats = lambda device: {}
torch.cpu.reset_peak_memory_stats = lambda: None

import torchtitan.train  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402


def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    """Attends as torch's flex_attention does, which has no backward pass on CPUs: over a mask of all pairs."""
    assert score_mod is None, "the debug model has none"
    mask = create_mask(block_mask.mask_mod, len(q), None, q.shape[2], k.shape[2], device="cpu")
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


def set_factor(module, factor, known=FSDPModule.set_gradient_divide_factor):
    """Sets FSDP2's factor, and has gradients summed without it: Gloo cannot multiply while it sums."""
    known(module, factor)
    module.set_force_sum_reduction_for_comms(True)


attention.FlexAttention._compiled_flex_attn = dense
attention._compiled_create_block_mask = create_block_mask  # as it is, since to compile it takes a minute
FSDPModule.set_gradient_divide_factor = set_factor

if __name__ == "__main__":
    torchtitan.train.main()
