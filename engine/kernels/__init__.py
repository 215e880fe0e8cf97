"""The operations a model is made of, each as one function on tensors.

`reference` holds every one in plain PyTorch; `registry` binds each to one implementation at load.
Knows nothing of models, weights or scheduling.
"""
