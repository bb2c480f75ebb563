// The memory that the instances of an aggregator, or of one of its jobs, may take together.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "ina/plan.h"

namespace sparsecomm {

// An instance that does not fit.
class NotAdmitted : public Error {
 public:
  using Error::Error;
};

// To be used by one thread, and to outlive what it grants.
class Admission {
 public:
  // `remedy`: what else helps where an instance does not fit.
  explicit Admission(std::size_t bytes,
                     std::string_view remedy = "allow the aggregator more memory")
      : bytes_(bytes), remedy_(remedy) {}
  Admission(Admission const&) = delete;
  Admission& operator=(Admission const&) = delete;

  // Room for one instance, given back when it goes.
  class Grant {
   public:
    Grant(Grant&& other) noexcept
        : admission_(std::exchange(other.admission_, nullptr)), bytes_(other.bytes_) {}
    Grant& operator=(Grant&& other) noexcept {
      std::swap(admission_, other.admission_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Grant() {
      if (admission_ != nullptr) admission_->taken_ -= bytes_;
    }
    std::size_t bytes() const { return bytes_; }

   private:
    friend class Admission;
    Grant(Admission& admission, std::size_t bytes) : admission_(&admission), bytes_(bytes) {
      admission.taken_ += bytes;
    }

    Admission* admission_;
    std::size_t bytes_;
  };

  // Throws InvalidArgument for a plan that nobody could run, NotAdmitted for one that does not fit,
  // with what it needs and what there is.
  Grant admit(InaPlan const& plan) {
    require_plan(plan);
    std::size_t const needed = instance_bytes(plan);
    require<NotAdmitted>(
        needed <= free(), "in-network aggregation: ", plan.workers, " workers with ",
        int(plan.window), " blocks of ", plan.block_bytes, " bytes of ", name(plan.type), " need ",
        needed, " bytes, but ", free(), " of ", bytes_,
        " are free; use a smaller window, smaller blocks or fewer instances, or ", remedy_);
    return {*this, needed};
  }

  std::size_t bytes() const { return bytes_; }
  std::size_t free() const { return bytes_ - taken_; }
  std::size_t taken() const { return taken_; }

 private:
  std::size_t bytes_;
  std::string_view remedy_;
  std::size_t taken_ = 0;
};

}  // namespace sparsecomm
