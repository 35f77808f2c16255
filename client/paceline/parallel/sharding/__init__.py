"""How FSDP spreads a model over ranks: the parts behind `paceline.FSDP`, from pure ones to the whole.

- Who holds which elements, and which unit comes next: `strategy`, `layout`, `order`.
- Memory: `flat`, `gradients`, `unit`. First use: `joining`.
- Gradients on their way: `scattering`, `reduction`. A whole pass: `units`. Dicts of it: `state`.
- Another share in another view: `resharding`.
"""
