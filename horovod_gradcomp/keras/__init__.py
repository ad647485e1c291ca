"""Horovod with gradient compression for Keras 3 and tf_keras, mirroring ``horovod.keras``.

On Keras 3 it is the only way: Horovod's own Keras optimizer runs there and never reduces::

    import horovod_gradcomp.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01 * hvd.size()), compression=hvd.Compression.topk(ratio=0.01)
    )
    model.compile(optimizer, loss="mse")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

It is ``keras`` that this serves, or ``tf_keras`` where ``TF_USE_LEGACY_KERAS=1`` is set.
"""

from ..core.errors import (
    BindingError,
    ExchangeError,
    GradCompError,
    SettingsError,
    StateError,
)
from . import callbacks
from .flavour import hvd as _hvd
from .flavour import runtime as _runtime
from .optimizer import DistributedOptimizer
from .saving import load_model

Compression = _runtime.Compression
Compressor = _runtime.Compressor

init, shutdown, is_initialized = _hvd.init, _hvd.shutdown, _hvd.is_initialized
size, local_size, cross_size = _hvd.size, _hvd.local_size, _hvd.cross_size
rank, local_rank, cross_rank = _hvd.rank, _hvd.local_rank, _hvd.cross_rank
start_timeline, stop_timeline = _hvd.start_timeline, _hvd.stop_timeline
mpi_threads_supported, mpi_enabled, mpi_built = (
    _hvd.mpi_threads_supported,
    _hvd.mpi_enabled,
    _hvd.mpi_built,
)
gloo_enabled, gloo_built, nccl_built = _hvd.gloo_enabled, _hvd.gloo_built, _hvd.nccl_built
cuda_built, rocm_built = _hvd.cuda_built, _hvd.rocm_built
Average, Sum = _hvd.Average, _hvd.Sum
ProcessSet, global_process_set = _hvd.ProcessSet, _hvd.global_process_set
add_process_set, remove_process_set = _hvd.add_process_set, _hvd.remove_process_set
allreduce, allgather, broadcast = _hvd.allreduce, _hvd.allgather, _hvd.broadcast
allgather_object, broadcast_object = _hvd.allgather_object, _hvd.broadcast_object

__all__ = [
    "Average",
    "BindingError",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "ExchangeError",
    "GradCompError",
    "ProcessSet",
    "SettingsError",
    "StateError",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "callbacks",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
