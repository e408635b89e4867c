"""Row-local array code, run on the fetched rows instead of on whole chunks.

Requested rows of ``da.log1p(X * s)`` depend only on the same rows of X and of s. `Compiler` walks the graph of an
array from each of its row chunks down to the stored matrices. It translates the graph into nodes that map their own
rows to the rows of their inputs:

- `Read`: rows (and columns) of a stored matrix;
- `Take`: a selection of the rows of a node, in any order (a getitem task);
- `Concat`: the rows of several nodes, concatenated;
- `Apply`: any other task, whose row i comes from row i of each of its inputs.

A fetch collects the rows that the nodes need, reads each matrix once, and computes from the leaves up. Row chunks whose
graphs differ only in the names of their inputs are computed together, since the rows of a fetch may come from many row
chunks.

The indices of Dask's blockwise layers and the block numbers show which rows each task receives. A graph does not show
that a *function* treats every row independently; `dasksc.pushdown.trust` assigns a level of trust to each. Before the
first fetch, all functions are tried on synthetic rows. A row must have the same values whether it is computed with all
others, with some of them, or alone. If some functions are only assumed to be row-local, each process also computes one
whole row chunk for each distinct computation, and compares it with the result for the fetched rows.
"""
