"""How FSDP spreads a model over ranks: the parts behind `paceline.FSDP`, pure ones first.

`strategy` (who holds what), `layout` (which elements), `order` (which unit comes next), `flat` (the memory), `unit`,
`scattering` (gradients on their way), `units` (a whole pass), `state` (dicts of it).
"""
