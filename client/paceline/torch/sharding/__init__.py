"""How `paceline.torch.FSDP` shows PyTorch to the FSDP for NumPy modules, which does all the rest.

- Tensors and arrays of the same memory: `memory`. Parameters and their pieces: `mirror`.
- A module as a NumPy module: `modules`, `adapter`; what it saves for its backward pass: `saved`.
- A backward pass that torch runs: `passes`; the wrapper that is driven by it: `engine`.
"""
