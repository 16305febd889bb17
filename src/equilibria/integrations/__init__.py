"""Watch inside trainers, and send samples to loggers; each of them is imported only with its own module.

- `equilibria.integrations.lightning.EquilibriaCallback`: for `lightning.Trainer`.
- `equilibria.integrations.transformers.EquilibriaCallback`: for `transformers.Trainer`.
- `equilibria.integrations.tensorboard.TensorBoardSink`, `wandb.WandbSink`, `mlflow.MLflowSink`: for
  ``equilibria.watch(..., sinks=[...])`` and both callbacks.
- `equilibria.integrations.wandb.WandbAlerts`: for ``on_finding=`` of all three.

The callbacks record the loss that their trainer knows. Sinks do not receive what ``monitor.log`` records: a script with
a logger sends it there itself, and a second curve of it would have another axis.
"""
