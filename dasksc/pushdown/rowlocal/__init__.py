"""Array code that treats every row alone, run on the rows taken instead of on whole chunks.

For ``da.log1p(X * s)`` the rows wanted of the result need the same rows of X and of s, nothing else.
`Compiler` walks the graph of an array from each of its row chunks down to the stored matrices and
turns it into nodes that know which of their own rows each row needs:

- `Read`: rows (and columns) of a stored matrix;
- `Take`: some rows of a node, in some order: a getitem task;
- `Concat`: the rows of several nodes one after another;
- `Apply`: any other task, whose row i comes from row i of each of its inputs.

A fetch asks the nodes what rows they need, reads each matrix once, and computes from the leaves up. Row chunks
whose graphs differ only in the names of what goes in are computed as one: the rows of a fetch lie in as many
chunks as there are blocks of them.

That a graph has this shape follows from the indices of Dask's blockwise layers and from block numbers.
That a *function* treats every row alone cannot be read off a graph; `dasksc.pushdown.trust` says who vouches for it.
Before the first row is served, all functions are tried on made-up rows, together, in parts and one by one. Where some
are merely believed, the first row chunk of each kind that is fetched from is also computed whole, once in each process,
and compared.
"""
