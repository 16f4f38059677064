"""Networks and the convolution they are made of; the only place that imports flax."""

from fedjax_het.nn.conv import conv2d
from fedjax_het.nn.conv_products import CONV_IMPLS
from fedjax_het.nn.digest import network_digest
from fedjax_het.nn.flops import training_flops
from fedjax_het.nn.generator import Generator, make_generator
from fedjax_het.nn.micro_batch import micro_batched_value_and_grad, piece_size
from fedjax_het.nn.models import Head, Model, Variables, count_parameters
from fedjax_het.nn.network import Network, as_model
from fedjax_het.nn.networks import NETWORKS, make_model, network_options, register_network
from fedjax_het.nn.norms import norm_mask, norms_of, with_norms
from fedjax_het.nn.projection import with_projection_head

__all__ = [
    "CONV_IMPLS",
    "NETWORKS",
    "Generator",
    "Head",
    "Model",
    "Network",
    "Variables",
    "as_model",
    "conv2d",
    "count_parameters",
    "make_generator",
    "make_model",
    "micro_batched_value_and_grad",
    "network_digest",
    "network_options",
    "norm_mask",
    "norms_of",
    "piece_size",
    "register_network",
    "training_flops",
    "with_norms",
    "with_projection_head",
]
