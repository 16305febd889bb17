"""Watch inside trainers, and send samples to loggers; each of them is imported only with its own module.

- `equilibria.integrations.lightning.EquilibriaCallback`: for `lightning.Trainer`.
- `equilibria.integrations.transformers.EquilibriaCallback`: for `transformers.Trainer`.
- `equilibria.integrations.tensorboard.TensorBoardSink`, `wandb.WandbSink`, `mlflow.MLflowSink`: for
  ``equilibria.watch(..., sinks=[...])`` and both callbacks.
"""
