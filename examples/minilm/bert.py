"""BERT, as much of it as sentence embeddings need. Modules are named as in MiniLM's file: its tensors load by name."""

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Bert", "Layer", "mean_pooled"]


class Bert(nn.Module):
    """The encoder, post-norm as in the paper; without dropout, segments other than the first, and the pooler.

    Args:
        config: what `config.json` of the model says.
    """

    def __init__(self, config):
        super().__init__()
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config["vocab_size"], width),
                "position_embeddings": nn.Embedding(config["max_position_embeddings"], width),
                "token_type_embeddings": nn.Embedding(config["type_vocab_size"], width),
                "LayerNorm": nn.LayerNorm(width, eps),
            }
        )
        layers = [Layer(config) for _ in range(config["num_hidden_layers"])]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})

    def forward(self, tokens, mask):
        """Hidden states.

        Args:
            tokens: ids, [B, T].
            mask: True where there is a token, [B, T]; the rest is padding.

        Returns:
            One vector for each token, [B, T, width]; those of padding mean nothing.
        """
        at = self.embeddings
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = at["word_embeddings"](tokens) + at["position_embeddings"](positions)
        x = at["LayerNorm"](x + at["token_type_embeddings"](torch.zeros_like(tokens)))
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
        return x


class Layer(nn.Module):
    """Attention, then two linear layers; each added to what it was given, and normed.

    Args:
        config: as for `Bert`.
    """

    def __init__(self, config):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]

        def added(features):
            """What ends a half of the layer."""
            norm = nn.LayerNorm(width, config["layer_norm_eps"])
            return nn.ModuleDict({"dense": nn.Linear(features, width), "LayerNorm": norm})

        projections = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": projections, "output": added(width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = added(inner)

    def forward(self, x, mask):
        """[B, T, width] to the same."""
        q, k, v = (  # each [B, heads, T, width / heads]
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in self.attention["self"].values()
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = _add(self.attention["output"], seen.transpose(1, 2).flatten(2), x)
        return _add(self.output, F.gelu(self.intermediate["dense"](x)), x)


def _add(half, found, x):
    return half["LayerNorm"](x + half["dense"](found))


def mean_pooled(hidden, mask):
    """Sentence embeddings of length 1, [B, width]: the mean over the tokens of each, normed."""
    mask = mask.unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1))
