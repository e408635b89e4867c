"""Built-in models, and the interface of a model.

A model is a ``torch.nn.Module`` that is called with a batch and returns a dict of means over the rows of the batch:
``loss``, which is minimized, and any other metrics (such as ``accuracy``). If the means are over other items, such as
masked tokens or labeled cells, the model also returns their number as ``n``, a scalar integer tensor, for every batch.
Metrics and gradients are then means over all items, regardless of their distribution over batches and ranks. If ``n``
is 0, the other values are ignored, but must still be finite.

Constructor parameters with the following names are filled in from the data unless the configuration gives them:

.. code-block:: text

    n_genes                  number of columns of X
    n_labels                 number of distinct labels in the obs column that the argument `label` names
    n_tokens, pad_id         size and padding id of the vocabulary of the tokenizer
    n_bins                   number of bins of the tokenizer, if it has bins
    max_seq_len              maximum length of a cell, in tokens
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dasksc import InputError
from dasksc.checks import check_flags

__all__ = ["Autoencoder", "MLPClassifier", "TokenTransformer", "log_normalised"]

_IGNORED = -100  # label of tokens that are not predicted


def log_normalised(counts: Tensor, total: float = 1e4) -> Tensor:
    """Scale each cell to the same total and take log(1 + x).

    Parameters
    ----------
    counts
        Dense or CSR, shape (batch, n_genes).
    total
        Total of each cell after scaling.

    Returns
    -------
    Tensor
        Copy, dense, float32, of the same shape.

    Examples
    --------
    >>> import torch
    >>> from dasksc.train.models import log_normalised
    >>> log_normalised(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), total=8.0)
    tensor([[1.0986, 1.9459],
            [0.0000, 0.0000]])
    """
    # PyTorch expands COO several times faster than CSR.
    dense = counts.to_sparse().to_dense() if counts.layout == torch.sparse_csr else counts
    dense = dense.float()
    return (dense * (total / dense.sum(dim=1, keepdim=True).clamp(min=1.0))).log1p()


class _Layers(nn.Module):
    """Linear layers, each except the last followed by layer norm, GELU and dropout."""

    def __init__(self, sizes: list[int], *, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(n_in, n_out), nn.LayerNorm(n_out), nn.GELU(), nn.Dropout(dropout))
            for n_in, n_out in pairwise(sizes[:-1])
        )
        self.last = nn.Linear(sizes[-2], sizes[-1])

    # FSDP gathers the parameters of a module only when it is called, so there is no other method.
    def forward(self, x: Tensor, *, is_hidden: bool = False) -> Tensor:
        """Return the output, or if `is_hidden` the input, of the last linear layer."""
        for block in self.blocks:
            x = block(x)
        return x if is_hidden else self.last(x)


class MLPClassifier(nn.Module):
    """Classifier that predicts an obs column from log-normalized counts.

    Parameters
    ----------
    label
        Name of the obs column. Cells without a label (code -1) are ignored.
    n_genes, n_labels
        Numbers of genes and of labels.
    hidden_dim, num_layers
        Width and number of the hidden layers; with 0 layers the model is linear.
    dropout
        Dropout probability after each hidden layer.

    Examples
    --------
    >>> from dasksc.train.models import MLPClassifier
    >>> batch = next(iter(dasksc.scDataset("atlas.h5ad", batch_size=64, obs=["cell_type"], seed=0)))
    >>> model = MLPClassifier("cell_type", n_genes=300, n_labels=6, hidden_dim=32)
    >>> sorted(model(batch)), model.embed(batch).shape
    (['accuracy', 'loss', 'n'], torch.Size([64, 32]))
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
        self.label = label
        self.layers = _Layers([n_genes, *[hidden_dim] * num_layers, n_labels], dropout=dropout)

    def scores(self, X: Tensor) -> Tensor:
        """Return a score for each label (logits), shape (batch, n_labels)."""
        return self.layers(log_normalised(X))

    def embed(self, batch: Any) -> Tensor:
        """Return the last hidden layer, shape (batch, hidden_dim)."""
        return self.layers(log_normalised(_x_of(batch)), is_hidden=True)

    def predict(self, batch: Any) -> dict[str, Tensor]:
        """Return the code of the most likely label of each cell as ``predicted``, shape (batch,)."""
        return {"predicted": self.scores(_x_of(batch)).argmax(dim=1)}

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return mean cross entropy and accuracy over the cells with a label, and their number `n`."""
        return _classified(self.scores(batch["X"]), batch["obs"][self.label], ignored=-1)


class Autoencoder(nn.Module):
    """Autoencoder of log-normalized counts with a low-dimensional latent representation.

    Parameters
    ----------
    n_genes
        Number of genes.
    latent_dim
        Dimension of the latent representation.
    hidden_dim, num_layers
        Width and number of the hidden layers of encoder and decoder.
    dropout
        Dropout probability after each hidden layer.
    variational
        If True, draw the latent representation from a normal distribution (in evaluation mode, use its mean), and add
        the KL divergence of this distribution from the standard normal distribution, divided by `n_genes`, to the loss.
        The division puts the divergence on the scale of the reconstruction error, which is a mean over genes.
    beta
        Weight of the KL divergence.

    Examples
    --------
    >>> from dasksc.train.models import Autoencoder
    >>> batch = next(iter(dasksc.scDataset("atlas.h5ad", batch_size=64, return_index=True, seed=0)))
    >>> model = Autoencoder(n_genes=300, latent_dim=8, variational=True)
    >>> sorted(model(batch)), model.embed(batch).shape
    (['divergence', 'error', 'loss'], torch.Size([64, 8]))
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
        check_flags(variational=variational)
        hidden = [hidden_dim] * num_layers
        self.variational = variational
        self.beta = beta
        self.encoder = _Layers([n_genes, *hidden, latent_dim * (2 if variational else 1)], dropout=dropout)
        self.decoder = _Layers([latent_dim, *hidden, n_genes], dropout=dropout)

    def embed(self, batch: Any) -> Tensor:
        """Return the latent representation of each cell (if variational, its mean), shape (batch, latent_dim)."""
        return self._posterior(log_normalised(_x_of(batch)))[0]

    def _posterior(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        encoded = self.encoder(x)
        if not self.variational:
            return encoded, None
        mean, log_variance = encoded.chunk(2, dim=1)
        return mean, log_variance.clamp(-10, 10)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the mean loss and, for a variational autoencoder, its two terms."""
        x = log_normalised(_x_of(batch))
        mean, log_variance = self._posterior(x)
        if log_variance is None:
            return {"loss": F.mse_loss(self.decoder(mean), x)}
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        error = F.mse_loss(self.decoder(drawn), x)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(dim=1).mean() / x.shape[1]
        return {"loss": error + self.beta * divergence, "error": error.detach(), "divergence": divergence.detach()}


class _TransformerBlock(nn.Module):
    """Transformer block: self-attention between the tokens of a cell, and a feed-forward network."""

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
        parts = self.queries_keys_values(self.norm_attention(x)).view(
            n, length, 3, self.num_heads, width // self.num_heads
        )
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=attendable, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.attended(heads.transpose(1, 2).reshape(n, length, width))
        return x + self.feed(self.norm_feed(x))


class TokenTransformer(nn.Module):
    """Transformer encoder over the tokens of a cell, trained to predict masked tokens or an obs column.

    Parameters
    ----------
    n_tokens, max_seq_len, pad_id, n_bins
        Size of the vocabulary, maximum length of a cell, id of padding, and number of bins.
    label, n_labels
        Name of an obs column to predict from the mean embedding of the tokens of a cell, and its number of labels.
        Without a label, the model predicts masked genes (or their bins, if `n_bins` is given, as for `ValueBins`). This
        requires a tokenizer with a ``mask_ratio``.
    hidden_dim, num_layers, num_heads
        Width, number of blocks, and number of attention heads per block.
    dropout
        Dropout probability in each block.

    Examples
    --------
    >>> from dasksc.train.models import TokenTransformer
    >>> tokens = dasksc.tokens.RankTokens(dasksc.open("atlas.h5ad").var_names, max_genes=16, mask_ratio=0.15)
    >>> batch = next(iter(dasksc.scDataset("atlas.h5ad", batch_size=64, transform=tokens, seed=0)))
    >>> model = TokenTransformer(len(tokens.vocabulary), tokens.max_length, hidden_dim=32, num_layers=1)
    >>> sorted(model(batch)), model.embed(batch).shape
    (['accuracy', 'loss', 'n'], torch.Size([64, 32]))
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
        if hidden_dim % num_heads:
            raise InputError(f"model.hidden_dim={hidden_dim} is not a multiple of num_heads={num_heads}")
        self.label = label
        self.max_seq_len = max_seq_len
        self.genes = nn.Embedding(n_tokens, hidden_dim, padding_idx=pad_id)
        self.positions = nn.Embedding(max_seq_len, hidden_dim) if n_bins is None else None
        self.values = nn.Linear(1, hidden_dim) if n_bins is not None else None
        self.blocks = nn.ModuleList(_TransformerBlock(hidden_dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_dim)
        self.head = nn.Linear(hidden_dim, (n_tokens if n_bins is None else n_bins) if label is None else n_labels or 1)

    def encode(self, batch: Any) -> Tensor:
        """Return an embedding of each token, shape (batch, length, hidden_dim)."""
        tokens = batch["input_ids"]
        if tokens.shape[1] > self.max_seq_len:
            raise InputError(
                f"a cell has {tokens.shape[1]} tokens, but model.max_seq_len is {self.max_seq_len}. Raise it, or lower "
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
        return self.norm(x)

    def embed(self, batch: Any) -> Tensor:
        """Return the mean embedding of the tokens of each cell, shape (batch, hidden_dim)."""
        return _pooled(self.encode(batch), batch)

    def predict(self, batch: Any) -> dict[str, Tensor]:
        """Return the code of the most likely label of each cell as ``predicted``, shape (batch,)."""
        if self.label is None:
            raise InputError("the model predicts no label: it was trained without model.label. Use its method embed")
        return {"predicted": self.head(self.embed(batch)).argmax(dim=1)}

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return mean cross entropy and accuracy over masked tokens or labeled cells, and their number `n`."""
        x = self.encode(batch)
        if self.label is not None:
            return _classified(self.head(_pooled(x, batch)), batch["obs"][self.label], ignored=-1)
        if "labels" not in batch:
            raise InputError("there is nothing to predict: give tokenizer.masking.mask_ratio, or model.label")
        return _classified(self.head(x).flatten(0, 1), batch["labels"].flatten(), ignored=_IGNORED)


def _x_of(batch: Any) -> Tensor:
    """Return X of a batch; the batch is X itself if the data set yields nothing else."""
    return batch if isinstance(batch, Tensor) else batch["X"]


def _pooled(x: Tensor, batch: Any) -> Tensor:
    """Return the mean over the tokens of each cell, without padding."""
    kept = batch["attention_mask"].unsqueeze(-1)
    return (x * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


def _classified(scores: Tensor, labels: Tensor, *, ignored: int) -> dict[str, Tensor]:
    """Return mean cross entropy and accuracy over the `n` labels other than `ignored`; means are 0 if `n` is 0."""
    counted = labels != ignored
    n = counted.sum()
    at_least_1 = n.clamp(min=1)
    labels = labels.long()
    loss = F.cross_entropy(scores.float(), labels, ignore_index=ignored, reduction="sum") / at_least_1
    right = ((scores.argmax(dim=-1) == labels) & counted).sum() / at_least_1
    return {"loss": loss, "accuracy": right, "n": n}
