// What DDP's reducer brings, as a bucket of ours.
#pragma once

#include "hook_state.h"

namespace c10d {
class GradBucket;
class Reducer;
}  // namespace c10d

namespace sparsecomm {

// Whether the reducer, which runs a hook or is at rest, brought the bucket.
bool is_bucket_of(c10d::GradBucket const& bucket, c10d::Reducer const& reducer);

// `reducer`: the one that runs the hook. It alone knows in which layout it has put the gradients:
// the one that parameters had when it made the buckets. Null: the one that they have now.
Bucket to_bucket(c10d::GradBucket& bucket, c10d::Reducer const* reducer);

}  // namespace sparsecomm
