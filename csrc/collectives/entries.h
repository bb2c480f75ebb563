// The entries of algorithms(), each defined in the file of its algorithm, and the makers that they
// hold.
#pragma once

#include <memory>

#include "collectives/algorithm.h"

namespace sparsecomm {

extern AlgorithmEntry const dense;
extern AlgorithmEntry const dense_ring;
extern AlgorithmEntry const dense_rabenseifner;
extern AlgorithmEntry const dense_overlap;
extern AlgorithmEntry const dense_inner;
extern AlgorithmEntry const topk_a;
extern AlgorithmEntry const ssar_recursive_double;
extern AlgorithmEntry const ssar_split_allgather;
extern AlgorithmEntry const dsar_split_allgather;
extern AlgorithmEntry const sparse_ring;
extern AlgorithmEntry const topk_dsa;
extern AlgorithmEntry const gaussian_k;
extern AlgorithmEntry const gtopk;
extern AlgorithmEntry const oktopk;
extern AlgorithmEntry const ina;
extern AlgorithmEntry const ina_sparse;

// The makers of an algorithm whose class template is A<V>, constructed from the options and, if it
// takes them, the services.
template <template <class> class A>
struct MakeSparseOf {
  template <class V>
  static std::unique_ptr<SparseAllreduce<V>> make(AlgorithmOptions const& options,
                                                  Services const& services) {
    return make_algorithm<A<V>>(options, services);
  }
  // For a lossless algorithm.
  static constexpr SparseMakers all{make<float>, make<double>, make<std::int32_t>,
                                    make<std::int64_t>};
  // For an algorithm that cuts or rounds.
  static constexpr SparseMakers floating{.f32 = make<float>, .f64 = make<double>};
};

}  // namespace sparsecomm
