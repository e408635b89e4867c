"""The section of a configuration that says which rows are kept from training, and what all sections share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["Paths", "Validation", "no_bool"]


def no_bool(value: Any) -> Any:
    """Refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _of_one_modality(path: str | list[str] | dict[str, str]) -> str | list[str] | dict[str, str]:
    paths = [path] if isinstance(path, str) else path.values() if isinstance(path, dict) else path
    if any(one.endswith(".h5mu") for one in paths):
        raise ValueError(
            "files of several modalities are read from Python (dasksc.scDataset); give an .h5ad or .zarr of one"
        )
    return path


Paths = Annotated[str | list[str] | dict[str, str], AfterValidator(_of_one_modality)]

_Share = Annotated[float, Field(ge=0, lt=1), BeforeValidator(no_bool)]
_Values = str | int | list[str] | list[int]
_HoldOut = dict[str, _Values]


class _Section(BaseModel):
    """Keys that are not in the schema are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Validation(_Section):
    """Which rows are kept from training.

    Parameters
    ----------
    share
        Of the rows, or of the values of `by`, or of the `conditions` of each context.
    by, groups, stratify
        Columns of obs, as for `dasksc.split`: whose values are held out as a whole (donors, plates), whose values are
        not to be on both sides, and of which both sides are to have their share.
    conditions, hold_out, few_shot, control
        As for `dasksc.split`: the columns whose combinations are held out as a whole, those that are held out instead
        of a `share`, the share of them that is trained on all the same, and the control cells, which are trained on.
    path
        Another atlas, instead of rows of the one that is trained on.
    seed
        Of the choice.
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
            raise ValueError("hold_out names what is held out, and share says how much; give one of them")
        return self
