// The driver, as far as csrc/kernels/cuda needs it.
#pragma once

struct CUctx_st;
using CUcontext = CUctx_st*;
using CUdevice = int;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_CONTEXT = 201 };
