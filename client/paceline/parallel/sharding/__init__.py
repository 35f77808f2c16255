"""How FSDP spreads a model over ranks: the parts behind `paceline.FSDP`, from pure ones to the whole.

`strategy` (who holds what), `layout` (which elements), `order` (which unit comes next); `flat` and `gradients` (memory),
`unit`, `joining` (first use); `scattering` and `reduction` (gradients on their way), `units` (a whole pass), `state` (dicts).
"""
