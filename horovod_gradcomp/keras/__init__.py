"""Horovod with gradient compression for Keras 3 and tf_keras, mirroring ``horovod.keras``::

    import horovod_gradcomp.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01 * hvd.size()), compression=hvd.Compression.topk(ratio=0.01)
    )
    model.compile(optimizer, loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

On Keras 3 it is the only way: Horovod's own Keras optimizer runs there and never reduces.
"""
from .flavour import hvd, runtime
from .optimizer import DistributedOptimizer
Compression = runtime.Compression
init=hvd.init; rank=hvd.rank; size=hvd.size
