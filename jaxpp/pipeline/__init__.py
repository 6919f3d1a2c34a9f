"""Run a schedule over stages: cut a model, place its parts, walk the table."""

from jaxpp.pipeline.cut import CutModel, cut_model
from jaxpp.pipeline.cuts import balanced_cuts, check_cuts, even_cuts
from jaxpp.pipeline.pipeline import Pipeline, Sums, fetch_states, make_pipeline
from jaxpp.pipeline.place import Place, make_places
from jaxpp.pipeline.run import Result, run
from jaxpp.pipeline.stage import Stage, stage_key
from jaxpp.pipeline.update import PipelineState, PipelineTrainer, clip_by_norm
from jaxpp.pipeline.whole import assemble, deal

__all__ = [
    "CutModel", "Pipeline", "PipelineState", "PipelineTrainer", "Place", "Result", "Stage", "Sums", "assemble",
    "balanced_cuts", "check_cuts", "clip_by_norm", "cut_model", "deal", "even_cuts", "fetch_states", "make_pipeline",
    "make_places", "run", "stage_key",
]  # fmt: skip
