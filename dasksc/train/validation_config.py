"""Schema of the ``validation`` section of a configuration, and the base class of all sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["Paths", "Validation", "no_bool"]


def no_bool(value: Any) -> Any:
    """Raise an error for booleans, which pydantic would convert to 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _of_one_modality(path: str | list[str] | dict[str, str]) -> str | list[str] | dict[str, str]:
    paths = [path] if isinstance(path, str) else path.values() if isinstance(path, dict) else path
    if any(one.endswith(".h5mu") for one in paths):
        raise ValueError(
            "files of several modalities can be read only in Python (dasksc.scDataset); give an .h5ad file or a .zarr "
            "store of one modality"
        )
    return path


Paths = Annotated[str | list[str] | dict[str, str], AfterValidator(_of_one_modality)]

_Share = Annotated[float, Field(ge=0, lt=1), BeforeValidator(no_bool)]
_Values = str | int | list[str] | list[int]
_HoldOut = dict[str, _Values]


class _Section(BaseModel):
    """Base class of sections, in which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Validation(_Section):
    """Rows held out from training for validation.

    Parameters
    ----------
    share
        Share of the rows to hold out; with `by`, share of its values; with `conditions`, share of the conditions of
        each context (such as a cell line).
    by, groups, stratify
        Columns of obs, as for `dasksc.split`. `by`: column whose values, such as donors or plates, are the units to
        hold out. `groups`: columns whose values are not divided between the parts. `stratify`: columns whose values
        have equal proportions in both parts.
    conditions, hold_out, few_shot, control
        As for `dasksc.split`. `conditions`: columns whose combinations of values define the conditions; all rows of a
        condition are in one part. `hold_out`: conditions to hold out instead of a `share`. `few_shot`: share of each
        context's `hold_out` conditions to keep in training. `control`: control cells, which are always used for
        training.
    path
        Path of another atlas to validate on, instead of held-out rows.
    seed
        Seed of the split.
    """

    share: _Share = 0.1
    by: str | None = None
    groups: str | list[str] | None = None
    stratify: str | list[str] | None = None
    conditions: str | list[str] | None = None
    hold_out: _HoldOut | list[_HoldOut] | None = None
    few_shot: _Share = 0.0
    control: str | dict[str, _Values] | None = None
    path: Paths | None = None
    seed: int = 0

    @model_validator(mode="before")
    @classmethod
    def _from_share(cls, value: Any) -> Any:
        return {"share": value} if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _one_way(self) -> Validation:
        if self.hold_out is not None and "share" in self.model_fields_set:
            raise ValueError("hold_out and share both select the validation rows; give one of them")
        return self
