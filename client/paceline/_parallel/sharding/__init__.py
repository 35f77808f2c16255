"""How FSDP shards a model over ranks: the parts behind `paceline.FSDP`, from the bottom up.

- `_placement`: which rank holds which elements. Pure.
- `_flat`, `_unit`: memory of parameters and gradients; first use.
- `_runner`: a pass through all units: gather, free, reduce gradients.
- `_sharded_model`: the sharded model, which the fronts for NumPy and for torch hold.
- `_state_dicts`: the model's values as dicts. `_holdings`: its shards, to save them or move to another share.
"""
