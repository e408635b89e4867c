"""The models that come along, and what any model must be.

A model is a ``torch.nn.Module`` that is called with a batch and returns a dict of means over its rows: ``loss``, which
is minimised, and whatever else is to be watched (``accuracy``). Where the means are over something else, such as cells
with a label or masked tokens, it returns their number for every batch as ``n``, a scalar integer tensor: figures and
steps are then means over all of them, however they lie in batches and on ranks. Where ``n`` is 0 the others must be
finite, and do not matter.

Parameters of its constructor that are called as below are filled in from the data unless the configuration gives them:

.. code-block:: text

    n_genes                  columns of X
    n_labels                 different labels in the obs column that the argument `label` names
    n_tokens, pad_id         of the tokenizer's vocabulary
    n_bins                   of the tokenizer, where tokens have values
    max_seq_len              the longest cell, in tokens
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dasksc import InputError
from dasksc.config import is_whole

__all__ = ["BUILT_IN", "Autoencoder", "MLPClassifier", "TokenTransformer", "log_normalised"]

_IGNORED = -100  # of a label that is not to be predicted


def log_normalised(counts: Tensor, total: float = 1e4) -> Tensor:
    """Scale each cell to the same total and take log(1 + x).

    Parameters
    ----------
    counts
        Shape (batch, n_genes); dense, or sparse CSR, which is made dense.
    total
        Of each cell after scaling.

    Returns
    -------
    Tensor
        Shape (batch, n_genes), dense. Copies.
    """
    dense = counts.to_dense() if counts.layout == torch.sparse_csr else counts
    dense = dense.float()
    return (dense * (total / dense.sum(dim=1, keepdim=True).clamp(min=1.0))).log1p()


def _check_sizes(dropout: Any, *, at_least: int, **sizes: Any) -> None:
    """Refuse sizes and shares that make no layer; `num_layers` is at least `at_least`, others 1."""
    for name, size in sizes.items():
        least = at_least if name == "num_layers" else 1
        if not is_whole(size) or size < least:
            raise InputError(f"model.{name}={size!r} must be a whole number of at least {least}")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"model.dropout={dropout!r} must be a number in [0, 1)")


class _Layers(nn.Module):
    """Linear maps, each but the last followed by a norm, a nonlinearity and dropout."""

    def __init__(self, sizes: list[int], *, dropout: float) -> None:
        super().__init__()
        hidden = [
            nn.Sequential(nn.Linear(n_in, n_out), nn.LayerNorm(n_out), nn.GELU(), nn.Dropout(dropout))
            for n_in, n_out in pairwise(sizes[:-1])
        ]
        self.blocks = nn.ModuleList(hidden)
        self.last = nn.Linear(sizes[-2], sizes[-1])

    def hidden(self, x: Tensor) -> Tensor:
        """Return what the last map is given."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.hidden(x))
        return result


class MLPClassifier(nn.Module):
    """Predict an obs column from log-normalised counts.

    Parameters
    ----------
    label
        The obs column; cells without a label (code -1) do not count.
    n_genes, n_labels
        Filled in from the data.
    hidden_dim, num_layers
        Width and number of the hidden layers; 0 layers make it a linear map.
    dropout
        After each hidden layer.
    """

    def __init__(
        self,
        label: str,
        n_genes: int,
        n_labels: int,
        hidden_dim: int = 256,
        num_layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        _check_sizes(dropout, at_least=0, hidden_dim=hidden_dim, num_layers=num_layers)
        self.label = label
        self.layers = _Layers([n_genes, *[hidden_dim] * num_layers, n_labels], dropout=dropout)

    def scores(self, X: Tensor) -> Tensor:
        """Return a score for each label, shape (batch, n_labels)."""
        result: Tensor = self.layers(log_normalised(X))
        return result

    def embed(self, batch: Any) -> Tensor:
        """Return the last hidden layer, shape (batch, hidden_dim)."""
        return self.layers.hidden(log_normalised(_x_of(batch)))

    def predict(self, batch: Any) -> dict[str, Tensor]:
        """Return the code of the most likely label of each cell as ``predicted``, shape (batch,)."""
        return {"predicted": self.scores(_x_of(batch)).argmax(dim=1)}

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the means of cross entropy and accuracy over the cells with a label, and their number `n`."""
        return _classified(self.scores(batch["X"]), batch["obs"][self.label], ignored=-1)


class Autoencoder(nn.Module):
    """Reconstruct log-normalised counts from a few numbers a cell.

    Parameters
    ----------
    n_genes
        Filled in from the data.
    latent_dim
        Numbers a cell.
    hidden_dim, num_layers
        Width and number of the hidden layers on either side.
    dropout
        After each hidden layer.
    variational
        Draw the numbers from a normal distribution whose divergence from the standard one is added to the loss.
    beta
        Weight of that divergence.
    """

    def __init__(
        self,
        n_genes: int,
        latent_dim: int = 32,
        hidden_dim: int = 256,
        num_layers: int = 1,
        dropout: float = 0.0,
        variational: bool = False,
        beta: float = 1.0,
    ) -> None:
        super().__init__()
        _check_sizes(dropout, at_least=0, hidden_dim=hidden_dim, num_layers=num_layers, latent_dim=latent_dim)
        hidden = [hidden_dim] * num_layers
        self.variational = variational
        self.beta = beta
        self.encoder = _Layers([n_genes, *hidden, latent_dim * (2 if variational else 1)], dropout=dropout)
        self.decoder = _Layers([latent_dim, *hidden, n_genes], dropout=dropout)

    def encode(self, X: Tensor) -> Tensor:
        """Return the mean of each cell's numbers, shape (batch, latent_dim)."""
        return self._posterior(log_normalised(X))[0]

    def embed(self, batch: Any) -> Tensor:
        """Return the mean of each cell's numbers, shape (batch, latent_dim)."""
        return self.encode(_x_of(batch))

    def _posterior(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        encoded = self.encoder(x)
        if not self.variational:
            return encoded, None
        mean, log_variance = encoded.chunk(2, dim=1)
        return mean, log_variance.clamp(-10, 10)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the means of the loss and, where variational, of its two parts."""
        x = log_normalised(_x_of(batch))
        mean, log_variance = self._posterior(x)
        if log_variance is None:
            return {"loss": F.mse_loss(self.decoder(mean), x)}
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        error = F.mse_loss(self.decoder(drawn), x)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(dim=1).mean() / x.shape[1]
        return {"loss": error + self.beta * divergence, "error": error.detach(), "divergence": divergence.detach()}


class _Block(nn.Module):
    """Attention between the tokens of a cell, and a small network for each of them."""

    def __init__(self, hidden_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(hidden_dim)
        self.queries_keys_values = nn.Linear(hidden_dim, 3 * hidden_dim)
        self.attended = nn.Linear(hidden_dim, hidden_dim)
        self.norm_feed = nn.LayerNorm(hidden_dim)
        self.feed = nn.Sequential(
            nn.Linear(hidden_dim, 4 * hidden_dim), nn.GELU(), nn.Linear(4 * hidden_dim, hidden_dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, attendable: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.queries_keys_values(self.norm_attention(x)).view(n, length, 3, self.num_heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=attendable, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.attended(heads.transpose(1, 2).reshape(n, length, width))
        result: Tensor = x + self.feed(self.norm_feed(x))
        return result


class TokenTransformer(nn.Module):
    """A transformer encoder over the tokens of a cell, trained to find what was masked or to predict an obs column.

    Parameters
    ----------
    n_tokens, max_seq_len, pad_id, n_bins
        Filled in from the tokenizer.
    label, n_labels
        The obs column to predict from the mean over a cell's tokens; without it, masked genes (or, where tokens have
        values, their bins) are predicted, and the tokenizer needs a ``mask_ratio``.
    hidden_dim, num_layers, num_heads
        Width, blocks, and attention heads of a block.
    dropout
        In each block.
    """

    def __init__(
        self,
        n_tokens: int,
        max_seq_len: int,
        pad_id: int = 0,
        n_bins: int | None = None,
        label: str | None = None,
        n_labels: int | None = None,
        hidden_dim: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        _check_sizes(dropout, at_least=1, hidden_dim=hidden_dim, num_layers=num_layers, num_heads=num_heads)
        if hidden_dim % num_heads:
            raise InputError(f"model.hidden_dim={hidden_dim} does not divide by num_heads={num_heads}")
        self.label = label
        self.max_seq_len = max_seq_len
        self.genes = nn.Embedding(n_tokens, hidden_dim, padding_idx=pad_id)
        self.positions = nn.Embedding(max_seq_len, hidden_dim) if n_bins is None else None
        self.values = nn.Linear(1, hidden_dim) if n_bins is not None else None
        self.blocks = nn.ModuleList(_Block(hidden_dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_dim)
        self.head = nn.Linear(hidden_dim, (n_tokens if n_bins is None else n_bins) if label is None else n_labels or 1)

    def encode(self, batch: Any) -> Tensor:
        """Return a vector for each token, shape (batch, length, hidden_dim)."""
        tokens = batch["input_ids"]
        if tokens.shape[1] > self.max_seq_len:
            raise InputError(
                f"a cell has {tokens.shape[1]} tokens and model.max_seq_len is {self.max_seq_len}; raise it, or lower "
                "tokenizer.max_genes"
            )
        x = self.genes(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        if self.values is not None:
            x = x + self.values(batch["values"].unsqueeze(-1).to(x.dtype))
        attendable = batch["attention_mask"][:, None, None, :]
        for block in self.blocks:
            x = block(x, attendable)
        result: Tensor = self.norm(x)
        return result

    def embed(self, batch: Any) -> Tensor:
        """Return the mean over each cell's tokens, shape (batch, hidden_dim)."""
        return _pooled(self.encode(batch), batch)

    def predict(self, batch: Any) -> dict[str, Tensor]:
        """Return the code of the most likely label of each cell as ``predicted``, shape (batch,)."""
        if self.label is None:
            raise InputError("the model predicts no label: it was trained without model.label. Use its method embed")
        return {"predicted": self.head(self.embed(batch)).argmax(dim=1)}

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the means of cross entropy and accuracy over masked tokens or labelled cells, and their number `n`."""
        x = self.encode(batch)
        if self.label is not None:
            return _classified(self.head(_pooled(x, batch)), batch["obs"][self.label], ignored=-1)
        if "labels" not in batch:
            raise InputError("there is nothing to predict: give tokenizer.masking.mask_ratio, or model.label")
        return _classified(self.head(x).flatten(0, 1), batch["labels"].flatten(), ignored=_IGNORED)


def _x_of(batch: Any) -> Tensor:
    """Return X of a batch; without names to yield, a batch is X itself."""
    x: Tensor = batch if isinstance(batch, Tensor) else batch["X"]
    return x


def _pooled(x: Tensor, batch: Any) -> Tensor:
    """Return the mean over the tokens of each cell that are there."""
    kept = batch["attention_mask"].unsqueeze(-1)
    result: Tensor = (x * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)
    return result


def _classified(scores: Tensor, labels: Tensor, *, ignored: int) -> dict[str, Tensor]:
    """Return the means of cross entropy and accuracy over the `n` labels that are not `ignored`; 0 where all are."""
    counted = labels != ignored
    n = counted.sum()
    at_least_1 = n.clamp(min=1)
    labels = labels.long()
    loss = F.cross_entropy(scores.float(), labels, ignore_index=ignored, reduction="sum") / at_least_1
    right = ((scores.argmax(dim=-1) == labels) & counted).sum() / at_least_1
    return {"loss": loss, "accuracy": right, "n": n}


class _VAE(Autoencoder):
    def __init__(
        self,
        n_genes: int,
        latent_dim: int = 32,
        hidden_dim: int = 256,
        num_layers: int = 1,
        dropout: float = 0.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__(n_genes, latent_dim, hidden_dim, num_layers, dropout, variational=True, beta=beta)


BUILT_IN: dict[str, type[nn.Module]] = {
    "mlp_classifier": MLPClassifier,
    "autoencoder": Autoencoder,
    "vae": _VAE,
    "transformer_encoder": TokenTransformer,
}
