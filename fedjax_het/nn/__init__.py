"""Networks and the convolution they are built from; the only package that imports flax."""

from fedjax_het.nn.conv import conv2d
from fedjax_het.nn.conv_products import CONV_IMPLS
from fedjax_het.nn.flops import count_training_flops
from fedjax_het.nn.generator import Generator, make_generator, make_image_generator
from fedjax_het.nn.micro_batch import choose_micro_batch_size, micro_batched_value_and_grad
from fedjax_het.nn.model import (
    Head,
    Model,
    Variables,
    count_parameters,
    get_norm_variables,
    norm_mask,
)
from fedjax_het.nn.network import NetworkSpec, compute_network_digest, to_model
from fedjax_het.nn.networks import NETWORKS, make_model, register_network
from fedjax_het.nn.projection_head import add_projection_head

__all__ = [
    "CONV_IMPLS",
    "NETWORKS",
    "Generator",
    "Head",
    "Model",
    "NetworkSpec",
    "Variables",
    "add_projection_head",
    "choose_micro_batch_size",
    "compute_network_digest",
    "conv2d",
    "count_parameters",
    "count_training_flops",
    "get_norm_variables",
    "make_generator",
    "make_image_generator",
    "make_model",
    "micro_batched_value_and_grad",
    "norm_mask",
    "register_network",
    "to_model",
]
