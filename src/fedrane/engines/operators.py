"""The operators that a recording on a CPU may repeat (:mod:`fedrane.engines.replay`).

Each has been recorded and repeated with the same bits by ``tests/engines/test_operators.py`` or ``test_replay.py``:
those of every method on every built-in model in both engines that record, and of common layers and losses. To add one,
add a layer that uses it there. It must be a function of its inputs alone: no random numbers, no output shape that
depends on values, no values handed to Python.
"""

from __future__ import annotations

_ATEN = """
__rshift__.Scalar _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _cdist_backward _cdist_forward _fft_r2c
_foreach_copy_ _foreach_mul.Scalar _linalg_eigh _log_softmax _log_softmax_backward_data _prelu_kernel
_prelu_kernel_backward _safe_softmax _softmax _softmax_backward_data _to_copy _unsafe_view abs adaptive_max_pool2d
adaptive_max_pool2d_backward add.Scalar add.Tensor add_.Tensor addcmul addmm alias amax amin any.dim arange arange.start
arange.start_step argmax argmin as_strided atan avg_pool2d avg_pool2d_backward baddbmm bitwise_and.Scalar
bitwise_and.Tensor bitwise_not bitwise_or.Tensor bitwise_xor.Tensor bmm cat ceil_ celu cholesky_inverse clamp
clamp.Tensor clamp_ clamp_min clamp_min_ clamp_min_.Tensor clone constant_pad_nd convolution convolution_backward copy_
cos cumprod cumsum detach detach_ diag_embed diagonal diagonal_backward div.Scalar div.Tensor div_.Scalar div_.Tensor
elu elu_backward embedding embedding_dense_backward empty.memory_format empty_like eq.Scalar eq.Tensor erf exp exp_
expand expm1 eye fill_.Scalar flip floor full_like gather ge.Scalar ge.Tensor gelu gelu_backward glu glu_backward
gt.Scalar gt.Tensor hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward huber_loss
huber_loss_backward index.Tensor index_add index_put index_select isnan le.Scalar leaky_relu leaky_relu_backward
lerp.Scalar lerp_.Tensor lift_fresh linalg_cholesky_ex linalg_qr linalg_vector_norm log log1p log2 log_
log_sigmoid_backward log_sigmoid_forward logical_and logical_and_ logical_or_ logsumexp lt.Scalar lt.Tensor
masked_fill.Scalar masked_fill_.Scalar max max.dim max_pool2d_with_indices max_pool2d_with_indices_backward maximum mean
mean.dim min min.dim minimum mish mkldnn_rnn_layer mm mse_loss mse_loss_backward mul.Scalar mul.Tensor mul_.Scalar
mul_.Tensor nan_to_num native_batch_norm native_batch_norm_backward native_group_norm native_layer_norm
native_layer_norm_backward ne.Scalar ne.Tensor neg new_empty new_full new_ones new_zeros nll_loss_backward
nll_loss_forward norm.ScalarOpt_dim ones ones_like permute pixel_shuffle pixel_unshuffle pow.Scalar pow.Tensor_Scalar
pow.Tensor_Tensor prod.dim_int promote_types reciprocal reciprocal_ reflection_pad1d reflection_pad2d
reflection_pad2d_backward relu relu_ repeat roll round rsqrt rsub.Scalar scalar_tensor scatter.src scatter.value
scatter_add select.int select_backward sgn sigmoid sigmoid_ sigmoid_backward sign silu sin slice.Tensor slice_backward
smooth_l1_loss smooth_l1_loss_backward softplus softplus_backward sort sort.stable split.Tensor sqrt squeeze.dim
squeeze.dims squeeze_.dim squeeze_.dims stack std.correction sub.Scalar sub.Tensor sub_.Tensor sum sum.dim_IntList t t_
tanh tanh_ tanh_backward threshold_backward topk transpose.int transpose_ tril triu unbind.int unfold unfold_backward
unsafe_split.Tensor unsqueeze unsqueeze_ upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest2d
upsample_nearest2d_backward var.correction var_mean.correction view where.self xlogy.Tensor zeros zeros_like
"""

REPLAYABLE = frozenset(f"aten::{name}" for name in _ATEN.split())
