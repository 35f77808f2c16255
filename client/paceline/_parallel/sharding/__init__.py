"""How FSDP shards a model over ranks: the parts behind `paceline.FSDP`, from pure ones to the whole.

- `_placement`: who holds which elements. Pure.
- `_flat`, `_unit`: memory of parameters and gradients; first use.
- `_runner`: a pass through all units: gather, free, reduce gradients.
- `_sharded_model`: the whole, which the fronts for NumPy and for torch hold.
- `_state_dicts`: its values as dicts. `_holdings`: its shards, to save them and to move to another share.
"""
