"""Callbacks that log a run to TensorBoard, Weights & Biases or MLflow.

Each needs its package, which is an extra: ``pip install 'fedrane[wandb]'``. Nothing is imported before one is made.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from fedrane._version import __version__
from fedrane.config.settings import dotted
from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics
from fedrane.errors import CheckpointError, ConfigError
from fedrane.experiment import Experiment
from fedrane.system import extras
from fedrane.system.files import clear_errors, require_text
from fedrane.training.callbacks import Callback
from fedrane.training.result import Result
from fedrane.training.run_folder import TRACKERS, Folder, default_name
from fedrane.training.wording import count

"""In a run folder: the runs of the services that it is logged to, by service and place."""
PROJECT = "fedrane"


def scalars(record: Metrics) -> dict[str, float]:
    """The numbers of a round's record by their names; lists have one number for each client."""
    kept = {k: v for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: value for name, value in kept.items() if name != "round"}


def flat_summary(summary: Metrics) -> dict[str, float]:
    """The numbers of a summary. Their names differ from those of the rounds, of which ``bytes_up`` is one, too.

    >>> flat_summary({"bytes_up": 100, "global/best": {"round": 3, "global/accuracy": 0.9}})
    {'summary/bytes_up': 100, 'summary/global/best/round': 3, 'summary/global/best/accuracy': 0.9}
    """
    nested = {name: value if isinstance(value, Mapping) else {"": value} for name, value in summary.items()}
    flat = {f"{name}/{k.rpartition('/')[2]}".strip("/"): v for name, inner in nested.items() for k, v in inner.items()}
    return {f"summary/{name}": v for name, v in flat.items() if isinstance(v, int | float) and name != "seed"}


class TensorBoardLogger(Callback):
    """Scalars for TensorBoard, in this folder."""

    def __init__(self, folder: str | Path) -> None:
        extras.require("report", "TensorBoard", "torch.utils.tensorboard")
        self.logs = Path(folder)
        require_text(self.logs, "TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self.open = SummaryWriter

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        done = history[-1]["round"] if history else 0
        with clear_errors(self.logs):
            self.writer: Any = self.open(str(self.logs), purge_step=done + 1)

    def round(self, record: Metrics) -> None:
        with clear_errors(self.logs):
            for name, value in scalars(record).items():
                self.writer.add_scalar(name, value, record["round"])
            self.writer.flush()

    def end(self, result: Result) -> None:
        self.writer.close()


class Tracker(Callback):
    """Logs a run to a service: its settings, the metrics of each round, the summary.

    A run that is resumed goes on in the same run of the service, whose id is in the run folder. One that was begun
    without this logger is logged from its first round.

    What does not work at the start is an error, before the first round. A failure after that never ends the training:
    ``notify`` is called once (a warning), and what is missing is sent at the end of the run.
    """

    SERVICE: ClassVar[str]
    HELP: ClassVar[str]
    """What to do if it cannot be used."""

    def __init__(self, notify: Callable[[str], None] = warnings.warn) -> None:
        self.notify = notify
        self.folder: Path | None = None
        self.unsent: list[tuple[int, dict[str, float]]] = []
        self.failed = self.is_open = False

    # ---- of each service

    def place(self) -> str:
        """Where in the service it logs: an id is known there only."""
        raise NotImplementedError

    def open(self, experiment: Experiment, settings: Mapping[str, Any], earlier: str | None) -> str:
        """Begin a run of the service, or go on with an earlier one; returns its id."""
        raise NotImplementedError

    def write(self, round: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def finish(self, summary: Mapping[str, float], finished: bool) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        """The run ends with an error."""
        raise NotImplementedError

    # ---- of all

    def prepare(self, folder: Path | None) -> None:
        self.folder = folder

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        self.unsent, self.failed = [], False
        self.name = f"{self.SERVICE}: {self.place()}"
        known = self._known().get(self.name, {})
        try:
            self.id = self.open(experiment, dotted(experiment.to_dict()), known.get("id"))
        except Exception as error:
            raise ConfigError(f"{self.SERVICE} cannot be used: {error}", remedy=self.HELP) from error
        self.is_open = True
        missing = known.get("missing", total + 1) if self.id == known.get("id") else 0
        self.unsent = [(record["round"], scalars(record)) for record in history if record["round"] >= missing]
        self._keep()
        self._send()

    def _known(self) -> dict[str, Any]:
        """What the run folder has of each service: the run's id there, and the first round that did not arrive."""
        kept = Folder(self.folder) if self.folder else None
        known = kept.read_json(TRACKERS) if kept and (kept.path / TRACKERS).is_file() else {}
        fits = isinstance(known, dict) and all(isinstance(entry, dict) for entry in known.values())
        if not fits or not all(isinstance(entry.get("missing", 0), int) for entry in known.values()):
            raise CheckpointError(f"{self.folder}: {TRACKERS} cannot be read", remedy="Remove it, to log to a new run")
        return dict(known)

    def _keep(self) -> None:
        if self.folder:
            entry = {"id": self.id, **({"missing": self.unsent[0][0]} if self.unsent else {})}
            known = self._known()
            if known.get(self.name) != entry:
                Folder(self.folder).write_json(TRACKERS, {**known, self.name: entry})

    def round(self, record: Metrics) -> None:
        self.unsent.append((record["round"], scalars(record)))
        self._send()

    def _send(self) -> None:
        """All that is left, unless it failed before: to try again in each round could cost a timeout in each."""
        try:
            while self.unsent and not self.failed:
                self._send_one()
        except Exception as error:  # noqa: BLE001 - a service may fail in any way; the training goes on
            self.failed = True
            self.notify(f"{self.SERVICE}: {error}; the training goes on, and the rest is sent at its end")
            self._keep()  # a run that is killed before its end sends the rest when it is resumed

    def _send_one(self) -> None:
        self.write(*self.unsent[0])
        del self.unsent[0]

    def end(self, result: Result) -> None:
        try:
            while self.unsent:
                self._send_one()
            self.finish(flat_summary(result.summary), result.finished)
        except Exception as error:  # noqa: BLE001 - the run has its results
            self.notify(f"{self.SERVICE}: {error}; {count(len(self.unsent), 'round')} did not arrive there")
        self._keep()
        self.is_open = False

    def close(self) -> None:
        if self.is_open:  # the run ended without ``end``
            self.is_open = False
            with suppress(Exception):  # the error that ended the run is the one to report
                self.abort()


class WandbLogger(Tracker):
    """Logs to Weights & Biases, into a project (default: ``WANDB_PROJECT``, or ``fedrane``).

    ``options`` are further arguments of ``wandb.init``, such as ``entity="lab"`` or ``mode="offline"``. Its files are
    in the run folder.
    """

    SERVICE = "Weights & Biases"
    HELP = "Log in with 'wandb login', or set WANDB_MODE=offline"

    def __init__(
        self, project: str | None = None, *, notify: Callable[[str], None] = warnings.warn, **options: Any
    ) -> None:
        super().__init__(notify)
        extras.require("wandb", self.SERVICE, "wandb")
        self.project = project or os.environ.get("WANDB_PROJECT") or PROJECT
        self.options = options

    def place(self) -> str:
        return self.project

    def open(self, experiment: Experiment, settings: Mapping[str, Any], earlier: str | None) -> str:
        import wandb

        tags = [experiment.method_name, experiment.dataset, f"seed {experiment.seed}"]
        asked: dict[str, Any] = {
            "project": self.project,
            "name": default_name(experiment),
            "tags": [Path(tag).name[-64:] for tag in tags],  # no tag may be longer
            "dir": str(self.folder) if self.folder else None,
            "reinit": "create_new",  # a run that the user has open is left alone
            **self.options,
        }
        self.run: Any = wandb.init(id=earlier, resume="allow" if earlier else None, **asked)
        self.run.config.update(dict(settings), allow_val_change=True)
        self.run.define_metric("*", step_metric="round")
        return str(self.run.id)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        self.run.log({"round": round, **values})

    def finish(self, summary: Mapping[str, float], finished: bool) -> None:
        self.run.summary.update(dict(summary))
        self.run.finish()

    def abort(self) -> None:
        self.run.finish(exit_code=1)


class MLflowLogger(Tracker):
    """Logs to the MLflow server or store at ``uri`` (default: ``MLFLOW_TRACKING_URI``, or MLflow's own).

    ``experiment`` is the name under which MLflow groups runs (default: ``MLFLOW_EXPERIMENT_NAME``, or ``fedrane``). A
    setting that changes when the run is resumed (``rounds``) becomes a tag, since MLflow's parameters are final.
    """

    SERVICE = "MLflow"
    HELP = "Check the URI, MLFLOW_TRACKING_URI by default"

    def __init__(
        self, uri: str | None = None, experiment: str | None = None, *, notify: Callable[[str], None] = warnings.warn
    ) -> None:
        super().__init__(notify)
        extras.require("mlflow", self.SERVICE, "mlflow", "sqlalchemy", "alembic")
        self.uri = uri
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT

    def place(self) -> str:
        import mlflow

        uri = self.uri or mlflow.get_tracking_uri()
        return f"{re.sub('//[^/@]*@', '//', uri)} {self.experiment}"  # without a password

    def open(self, experiment: Experiment, settings: Mapping[str, Any], earlier: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self.client, self.metric = MlflowClient(self.uri), Metric
        group = self.client.get_experiment_by_name(self.experiment)
        texts = {name: str(value) for name, value in settings.items()}
        if earlier:
            self.id = earlier
            self.client.update_run(self.id, status="RUNNING")
            before = self.client.get_run(self.id).data.params
        else:
            place = group.experiment_id if group else self.client.create_experiment(self.experiment)
            about = {"method": experiment.method_name, "dataset": experiment.dataset, "seed": str(experiment.seed)}
            tags = {**about, "fedrane": __version__}
            self.id = self.client.create_run(place, tags=tags, run_name=default_name(experiment)).info.run_id
            before = {}
        new = [Param(name, text) for name, text in texts.items() if name not in before]
        changed = [RunTag(name, text) for name, text in texts.items() if before.get(name, text) != text]
        for first in range(0, max(len(new), 1), 100):  # no batch may have more
            self.client.log_batch(self.id, params=new[first : first + 100], tags=[] if first else changed)
        return str(self.id)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self.metric(name, value, now, round) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def finish(self, summary: Mapping[str, float], finished: bool) -> None:
        self.write(int(summary["summary/rounds"]), summary)
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")

    def abort(self) -> None:
        self.client.set_terminated(self.id, "FAILED")
