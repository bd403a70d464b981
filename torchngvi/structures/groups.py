"""Forests as a model has them: groups below common parameters, groups in groups, or any parents."""

from collections.abc import Iterable, Sequence

from torchngvi.arguments import read_list, read_size, read_sizes
from torchngvi.errors import InputError
from torchngvi.structures.block_diagonal import block_diagonal
from torchngvi.structures.forest import Forest
from torchngvi.structures.full_algebra import FullAlgebra

_ONES = "must be positive integers, at least one"


def arrow(
    *,
    groups: int | None = None,  # n
    local: int | Sequence[int],  # r, the local parameters of each group, or one number a group
    globals: int,  # p
) -> Forest:
    """The pattern of n groups with local parameters, and of global ones: θ = (b₁, ..., bₙ, g).

    Given g the groups are independent.  Wanted for a hierarchical model: the precision S of its posterior then has n
    blocks S_i, n borders S_gi and one block S_g, which takes n r (r + p) + p² numbers in the place of (n r + p)².

    Args:
        groups: n; left out where ``local`` has one number a group.
        local: r, of all groups or of each.
        globals: p, the parameters that all groups share; the last coordinates of θ.

    Returns:
        The structure, for a posterior that holds a precision or its root.

    Raises:
        InputError: numbers that are no positive integers, or not one a group.

    >>> arrow(groups=59, local=2, globals=9)
    Forest(59 of 2 below 9, 1 of 9)
    >>> arrow(local=[1, 2, 2], globals=1).dim
    6
    """
    if isinstance(local, Iterable):
        sizes = list(read_sizes("local", local, _ONES, none=False))
        if groups is not None and groups != len(sizes):
            raise InputError(f"local must be one number, or one for each of the {groups} groups; got {len(sizes)}.")
    else:
        if groups is None:
            raise InputError("say how many groups there are, groups=n, or give local= one number for each group.")
        sizes = [read_size("local", local, "is a number of parameters")] * read_size("groups", groups, "counts groups")
    globals = read_size("globals", globals, "is a number of parameters")  # noqa: A001
    return Forest((len(sizes),) * len(sizes) + (-1,), (*sizes, globals))


def nested(
    *within: Sequence[int],  # of each node of a level, the number of its parent in the next
    local: Sequence[int],  # parameters of each node, one number a level, innermost first
    globals: int = 0,
) -> Forest:
    """The pattern of groups in groups: pupils in classes in schools, θ = (pupils, classes, schools, globals).

    Args:
        within: for each level but the outermost, one number a node: which node of the next level it belongs to,
            counted from 0.
        local: the parameters of each node of the first, second, ... level; one more than there are ``within``.
        globals: the parameters that all share, the last coordinates of θ; 0 for none.

    Returns:
        The structure, for a posterior that holds a precision or its root.

    Raises:
        InputError: another number of levels than of ``local``, parents that are not numbered 0, 1, ..., or numbers that
            are no positive integers.

    >>> nested([0, 0, 1, 1, 1, 2], [0, 0, 1], local=[1, 2, 1], globals=3)  # 6 pupils, 3 classes, 2 schools
    Forest(6 of 1 below 6, 3 of 2 below 4, 2 of 1 below 3, 1 of 3)
    """
    within = tuple(
        read_sizes("within", level, "is one parent a node, numbers from 0 on", at_least=0) for level in within
    )
    local = read_sizes("local", local, _ONES, none=False)
    globals = read_size("globals", globals, "is a number of parameters", at_least=0)  # noqa: A001
    if not within or len(local) != len(within) + 1:
        raise InputError(
            "nested groups need the parents of each level but the outermost, and one number of parameters a level; got "
            f"{len(within)} lists of parents and {len(local)} numbers."
        )
    counts = [len(level) for level in within] + [max(within[-1], default=-1) + 1]
    for level, (parents, count) in enumerate(zip(within, counts[1:], strict=True)):
        if not len(parents) or any(not 0 <= parent < count for parent in parents):
            raise InputError(
                f"the parents of level {level + 1} must be numbers from 0 to {count - 1} of the nodes of the next "
                f"level, at least one; got {min(parents, default=None)} to {max(parents, default=None)}."
            )
    parents_of, sizes, start = [], [], 0
    for level, count in enumerate(counts):
        start += count
        upper = within[level] if level < len(within) else [0 if globals else -1 - start] * count
        parents_of += [start + parent for parent in upper]
        sizes += [local[level]] * count
    return Forest((*parents_of, -1), (*sizes, globals)) if globals else Forest(tuple(parents_of), tuple(sizes))


def forest(
    *,
    parents: Sequence[int | None],  # of each node, the number of a later one; -1 or None of a root
    sizes: Sequence[int],  # of the nodes, in the order of θ
) -> Forest | FullAlgebra:
    """The pattern of a forest: each node holds a block of coordinates, beside those of all its ancestors.

    The entries of θ stand in the order of the nodes, and children before their parents: locals first, globals last.

    Args:
        parents: of each node the number of its parent, a later node; -1 or None of a root.
        sizes: the number of coordinates of each node.

    Returns:
        The structure, for a posterior that holds a precision or its root; of roots alone independent blocks, which
        every posterior takes.

    Raises:
        InputError: parents and sizes of different numbers, a parent that does not come later, or a size that is no
            positive integer.

    >>> forest(parents=[3, 3, 4, 4, -1], sizes=[1, 1, 2, 1, 2])
    Forest(2 of 1 below 3, 1 of 2 below 2, 1 of 1 below 2, 1 of 2)
    >>> forest(parents=[-1, -1], sizes=[2, 2])  # roots only
    EqualBlocks(count=2, size=2)
    """
    sizes = read_sizes("sizes", sizes, _ONES)
    what = "are numbers of nodes, or -1 or None of a root"
    given = [-1 if parent is None else parent for parent in read_list("parents", parents, what)]
    parents = read_sizes("parents", given, what, at_least=-1)
    if len(parents) != len(sizes) or not sizes:
        raise InputError(
            f"a forest needs one parent and one size a node, at least one; got {len(parents)} parents and "
            f"{len(sizes)} sizes."
        )
    for node, parent in enumerate(parents):
        if parent != -1 and not node < parent < len(sizes):
            raise InputError(
                f"children stand before their parents, and roots have the parent -1: node {node} of {len(sizes)} must "
                f"have a later node for a parent; got {parent}."
            )
    return block_diagonal(sizes) if set(parents) == {-1} else Forest(parents, sizes)
