"""Run a schedule over stages: cut a model, place its parts, walk the table."""

from jaxpp.pipeline.canonical import fetch_states, join_states, split_state
from jaxpp.pipeline.cut import CutModel, cut_model
from jaxpp.pipeline.cuts import balanced_cuts, check_cuts, even_cuts
from jaxpp.pipeline.pipeline import Pipeline, Sums, make_pipeline
from jaxpp.pipeline.place import Place, make_places
from jaxpp.pipeline.run import Result, run
from jaxpp.pipeline.stage import Stage, stage_key
from jaxpp.pipeline.update import PipelineState, Trainer, clip_by_given_norm

__all__ = [
    "CutModel", "Pipeline", "PipelineState", "Place", "Result", "Stage", "Sums", "Trainer", "balanced_cuts",
    "check_cuts", "clip_by_given_norm", "cut_model", "even_cuts", "fetch_states", "join_states",
    "make_pipeline", "make_places", "run", "split_state", "stage_key",
]  # fmt: skip
