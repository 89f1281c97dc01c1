// Products of matrices by the function torch itself calls in the end, without what torch does before.
//
// For a small layer that takes longer than the product: views are made, types promoted, backends chosen, for each of
// its twelve products anew. Which operands lie how is known when a step is written down. The addresses of cuBLAS and of
// torch's function for its handle are handed in, as no header of CUDA need be there.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

namespace batchformer {

// cublas_api.h, library_types.h
constexpr int kPlain = 0, kTransposed = 1;
constexpr int kDefaultMath = 0, kInFloat32 = 68, kTensorCores = 99;
constexpr int kBFloat16 = 14;

// One matrix in the terms of cuBLAS, for which a matrix of torch is transposed: rows that lie one after the other are
// columns there.
struct Layout {
  int operation, leading;

  static std::optional<Layout> of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    if (sizes.size() != 2) return {};
    const auto rows = sizes[0], columns = sizes[1], most = int64_t(std::numeric_limits<int>::max());
    // vectors lie both ways: torch decides
    if (rows < 2 || columns < 2 || rows > most || columns > most || strides[0] > most || strides[1] > most) return {};
    if (strides[1] == 1 && strides[0] >= columns) return Layout{kPlain, int(strides[0])};
    if (strides[0] == 1 && strides[1] >= rows) return Layout{kTransposed, int(strides[1])};
    return {};
  }
};

// into = left right, or into += left right; all that depends on shapes.
struct Product {
  int rows, columns, inner;
  Layout left, right, into;

  // Nothing, where it is left to torch. `into` has rows that lie one after the other.
  static std::optional<Product> of(const std::optional<Layout>& left, const std::optional<Layout>& right,
                                   const std::optional<Layout>& into, int64_t rows, int64_t columns, int64_t inner) {
    if (!left || !right || !into || into->operation != kPlain) return {};
    return Product{int(rows), int(columns), int(inner), *left, *right, *into};
  }
};

class Blas {
 public:
  // Addresses of getCurrentCUDABlasHandle, cublasSetMathMode and cublasGemmEx; none: all is left to torch.
  explicit Blas(const std::vector<int64_t>& addresses) {
    if (addresses.size() != 3) return;
    handle_of_ = reinterpret_cast<HandleOf>(addresses[0]);
    set_math_ = reinterpret_cast<SetMath>(addresses[1]);
    gemm_ = reinterpret_cast<Gemm>(addresses[2]);
  }

  // Whether torch, as it is set up now, would do products in bfloat16 just so; but for TunableOp, which is passed by.
  bool is_on() const {
    if (gemm_ == nullptr) return false;
    auto& torch = at::globalContext();
    const auto backend = torch.blasPreferredBackend();
    return is_default(torch.allowBF16ReductionCuBLAS()) && !torch.deterministicAlgorithms() &&
           (backend == at::BlasBackend::Default || backend == at::BlasBackend::Cublas);
  }

  // For the current device, stream and thread.
  void* handle() const {
    void* handle = handle_of_(true);
    check(set_math_(handle, kDefaultMath));
    return handle;
  }

  void multiply(void* handle, const Product& p, const void* left, const void* right, void* into, float keep) const {
    const float one = 1.0f;
    // transposed: into' = right' left'
    check(gemm_(handle, p.right.operation, p.left.operation, p.columns, p.rows, p.inner, &one, right, kBFloat16,
                p.right.leading, left, kBFloat16, p.left.leading, &keep, into, kBFloat16, p.into.leading, kInFloat32,
                kTensorCores));
  }

 private:
  using HandleOf = void* (*)(bool);  // of some versions of torch without an argument: they do not look at it
  using SetMath = int (*)(void* handle, int mode);
  using Gemm = int (*)(void* handle, int, int, int m, int n, int k, const void* alpha, const void* a, int a_type,
                       int lda, const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc,
                       int compute_type, int algorithm);

  template <class Option>
  static bool is_default(Option reduction) {  // a bool once, several choices now, of which the first is the default
    if constexpr (std::is_same_v<Option, bool>)
      return reduction;
    else
      return reduction == Option(0);
  }

  static void check(int status) {
    TORCH_CHECK(status == 0, "batchformer: a matrix product could not be started (cuBLAS status ", status, ")");
  }

  HandleOf handle_of_ = nullptr;
  SetMath set_math_ = nullptr;
  Gemm gemm_ = nullptr;
};

}  // namespace batchformer
