// Which parameters a hook's state exchanges together, and how each group of them.
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "hook_step.h"

namespace sparsecomm {

// Whether the parameters, in this order, are a group's.
bool HookState::is_group(std::vector<at::Tensor> const& parameters) const {
  ParameterGroup const* group = nullptr;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto const place = places_.find(parameters[i].unsafeGetTensorImpl());
    if (place == places_.end() || place->second.member != i) return false;
    if (group == nullptr) group = place->second.group;
    if (place->second.group != group) return false;
  }
  return group == nullptr || group->members().size() == parameters.size();
}

// Parameters that no bucket has brought before form new groups, in the order of the buckets, see
// GroupsBy; those with a density or a velocity's rule of their own further ones. Of a state that
// was loaded and goes by arrival, so do those that were apart when it was saved: momenta that a
// scheduler has made equal since may differ again. Where nothing is kept all of a bucket that is
// new do; a group that has none left is no more.
void HookState::form_groups(std::vector<Bucket const*> const& buckets) {
  struct Fresh {
    at::ScalarType dtype;
    int number;
    std::optional<double> density;
    VelocityRule velocity;
    std::optional<std::size_t> saved;  // index of the loaded group
    std::vector<ParameterGroup::Member> members;
    std::vector<at::Tensor> parameters;
  };
  std::vector<Fresh> fresh;
  std::unordered_map<std::string, std::size_t> saved_groups;
  bool const as_saved = loaded_ && groups_by_ == GroupsBy::arrival;
  for (std::size_t i = 0; as_saved && i < loaded_->groups.size(); ++i) {
    for (std::string const& key : loaded_->groups[i].parameters) saved_groups.emplace(key, i);
  }
  bool regroups = false;
  std::vector<std::pair<Bucket const*, std::size_t>> arrived;  // buckets, and places in them
  for (Bucket const* const bucket : buckets) {
    std::vector<at::Tensor> const& parameters = bucket->parameters;
    bool const renewed = by_bucket_ && !is_group(parameters);
    regroups = regroups || renewed;
    if (!by_bucket_ && groups_by_ == GroupsBy::bucket) dissolve_unlike_groups(parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (renewed || !places_.contains(parameters[i].unsafeGetTensorImpl()))
        arrived.emplace_back(bucket, i);
    }
  }
  // Of groups that are formed anew: buckets may not come on all ranks in the order of the first
  // step, and what was found for the same members is of use again.
  if (groups_by_ == GroupsBy::number) {
    std::ranges::stable_sort(arrived, {}, [this](auto const& place) {
      auto const former =
          former_places_.find(place.first->parameters[place.second].unsafeGetTensorImpl());
      return former == former_places_.end() ? std::numeric_limits<std::size_t>::max()
                                            : former->second.order;
    });
  }
  for (auto const& [bucket, place] : arrived) {
    at::ScalarType const dtype = bucket->buffer.scalar_type();
    at::Tensor const& parameter = bucket->parameters[place];
    if (!places_.contains(parameter.unsafeGetTensorImpl())) require_of_model(parameter);
    require(!parameter.is_complex(), "gradients of dtype ", at::toString(parameter.scalar_type()),
            " cannot be exchanged sparsely; parameters must be float32, float64, float16 or "
            "bfloat16");
    auto const density = density_of(parameter);
    auto const velocity = velocity_of(parameter.unsafeGetTensorImpl());
    int const number = group_number_of(parameter);
    std::string key = key_of(parameter);
    auto const found = saved_groups.find(key);
    auto const saved = found == saved_groups.end() ? std::nullopt : std::optional(found->second);
    auto group = std::ranges::find_if(fresh, [&](Fresh const& other) {
      return other.dtype == dtype && other.number == number && other.density == density &&
             other.velocity == velocity && other.saved == saved;
    });
    if (group == fresh.end()) {
      group = fresh.insert(fresh.end(), Fresh{dtype, number, density, velocity, saved, {}, {}});
    }
    std::size_t const offset =
        group->members.empty() ? 0 : group->members.back().offset + group->members.back().numel;
    group->members.push_back({std::move(key), offset, static_cast<std::size_t>(parameter.numel()),
                              Layout(parameter), parameter.unsafeGetTensorImpl()});
    group->parameters.push_back(parameter);
  }
  // In the order of their numbers; what has none comes last.
  std::ranges::stable_sort(fresh, {},
                           [](Fresh const& group) { return static_cast<unsigned>(group.number); });
  for (Fresh& group : fresh) {
    add_group(group.dtype, group.density, group.velocity, std::move(group.members),
              group.parameters);
  }
  if (regroups) drop_empty_groups();
}

// Of those that are to be exchanged together.
int HookState::group_number_of(at::Tensor const& parameter) const {
  auto const number = group_numbers_.find(parameter.unsafeGetTensorImpl());
  return number == group_numbers_.end() ? -1 : number->second;
}

// Groups that have some of these parameters, unless all of them together have exactly these: DDP
// has made its buckets anew. What they have kept waits for the buckets that bring the others.
void HookState::dissolve_unlike_groups(std::vector<at::Tensor> const& parameters) {
  std::set<ParameterGroup*> touched;
  std::size_t known = 0, members = 0;
  for (at::Tensor const& parameter : parameters) {
    auto const place = places_.find(parameter.unsafeGetTensorImpl());
    if (place == places_.end()) continue;
    ++known;
    if (touched.insert(place->second.group).second)
      members += place->second.group->members().size();
  }
  if (known == parameters.size() && members == known) return;
  for (ParameterGroup* const group : touched) dissolve(*group);
}

void HookState::dissolve(ParameterGroup& group) {
  if (!dissolved_) {
    dissolved_.emplace();
    dissolved_->loss_scale = group.state().loss_scale;
  }
  group.follow(dissolved_->loss_scale);
  // First, since copies may find no memory.
  if (side_) side_->let_current_wait();
  keep(group, *dissolved_);
  if (side_) side_->wait_for_current();
  for (ParameterGroup::Member const& member : group.members()) {
    Place& place = places_.at(member.parameter);
    former_places_.insert_or_assign(
        member.parameter, FormerPlace{member.key, place.order, std::move(place.delivered)});
    places_.erase(member.parameter);
  }
  std::uint64_t const steps = group.steps();
  left_ += group.stats();
  left_.steps = std::max(left_.steps, steps);
  own_densities_.erase(&group);
  std::erase_if(groups_, [&](auto const& other) { return other.get() == &group; });
}

// Leaves in the gradients what is new since the last exchange. Returns which of them this rank has
// not used.
std::vector<bool> HookState::take_fresh(Bucket const& bucket, PendingBucket& pending) {
  std::vector<bool> unused = bucket.unused;
  unused.resize(bucket.parameters.size());
  for (std::size_t i = 0; i < unused.size() && !by_bucket_; ++i) {
    at::Tensor const& parameter = bucket.parameters[i];
    Place& place = places_.at(parameter.unsafeGetTensorImpl());
    if (bucket.continues) place.group->continue_step();
    if (!bucket.of_grads) continue;
    if (!place.delivered) {
      place.delivered = DeliveredGradient::follow(parameter, place.group->has_moment());
    }
    if (!place.delivered) {  // frozen since DDP was made
      unused[i] = true;
      continue;
    }
    auto const fresh = place.delivered->take_fresh(bucket.gradients[i], {step_, &step_->stands});
    unused[i] = unused[i] || !fresh.used;
    if (!fresh.former.defined()) continue;
    if (fresh.continues) place.group->continue_step();
    place.group->hold_former(fresh.former);
    if (side_) side_->use(fresh.former);
    pending.continued.emplace_back(bucket.results.empty() ? bucket.gradients[i] : bucket.results[i],
                                   fresh.former);
  }
  return unused;
}

// The gradients in the layout of their residuals, which is that of the parameters, so that it does
// not depend on when DDP has made its buckets. Where the bucket has another they are copied, before
// the exchange and after it.
std::vector<at::Tensor> HookState::arrange(Bucket const& bucket, PendingBucket& pending) {
  c10::NoGradGuard const no_grad;
  std::vector<at::Tensor> arranged = bucket.gradients;
  for (std::size_t i = 0; i < arranged.size(); ++i) {
    at::Tensor const& parameter = bucket.parameters[i];
    Place const place = places_.at(parameter.unsafeGetTensorImpl());
    Layout const& layout = place.group->members()[place.member].layout;
    if (!layout.fits(parameter)) place.group->lay_out(place.member, parameter);
    at::Tensor const& gradient = bucket.gradients[i];
    at::Tensor const& result = bucket.results.empty() ? gradient : bucket.results[i];
    bool const fits = layout.is_of(gradient) || (layout.row_major() && gradient.is_contiguous());
    if (fits && result.is_same(gradient)) continue;
    at::Tensor const copy =
        at::empty_strided(layout.sizes(), layout.strides(), bucket.buffer.options());
    copy.copy_(gradient.reshape(layout.sizes()));
    if (side_) side_->use(copy);
    pending.moved.emplace_back(copy, result);
    arranged[i] = copy;
  }
  return arranged;
}

// Of one that no bucket has brought before.
void HookState::require_of_model(at::Tensor const& parameter) const {
  void const* const key = parameter.unsafeGetTensorImpl();
  require(!sealed_ || names_.contains(key) || former_places_.contains(key), "a parameter of shape ",
          parameter.sizes(),
          " was not in this state's first step: a state belongs to one model; make one per model");
}

void HookState::add_group(at::ScalarType dtype, std::optional<double> density,
                          VelocityRule const& velocity, std::vector<ParameterGroup::Member> members,
                          std::vector<at::Tensor> const& parameters) {
  // Its exchange's name is the same on ranks that disagree about what is in the group; but ranks
  // may form groups anew in any order.
  std::string const& key = members.front().key;
  bool const anew = former_places_.contains(members.front().parameter);
  std::size_t const number = anew ? 0 : groups_formed_++;
  std::string const name = anew ? concat("from ", key) : concat(number, " from ", key);
  std::string operation = concat("gradients ", anew ? name : concat(number));
  auto group =
      ParameterGroup::make(name, std::move(operation), dtype, std::move(members),
                           options_at(density, velocity), *communicator_, !by_bucket_, side_.get());
  group->set_steps_before(left_.steps);
  if (restore_dissolved(*group)) {
    adopt_plan(*group);
  } else if (loaded_) {
    // This may throw: then the group is not there in the next step either.
    check_loaded(*group);
    restore(*group);
  }
  copy_moments_to(*group);
  groups_.push_back(std::move(group));
  for (at::Tensor const& parameter : parameters) moments_.erase(parameter.unsafeGetTensorImpl());
  if (density) own_densities_.emplace(groups_.back().get(), *density);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    void const* const key = parameters[i].unsafeGetTensorImpl();
    auto const former = former_places_.extract(key);
    auto const known = places_.find(key);
    if (former) {
      places_[key] = {groups_.back().get(), i, former.mapped().order, former.mapped().delivered};
    } else if (known != places_.end()) {
      known->second = {groups_.back().get(), i, known->second.order};
    } else {
      std::size_t const order = places_.size() + former_places_.size();
      parameters_.push_back(parameters[i]);
      places_[key] = {groups_.back().get(), i, order};
    }
  }
}

void HookState::drop_empty_groups() {
  std::set<ParameterGroup const*> used;
  for (auto const& [parameter, place] : places_) used.insert(place.group);
  std::erase_if(groups_, [&](auto const& group) {
    if (used.contains(group.get())) return false;
    left_ += group->stats();
    return true;
  });
}

// Before a step: what the last ones have found in groups without a density of their own.
void HookState::share_density() const {
  if (!options_.exchange.shares_density) return;
  auto const shares = [this](auto const& group) { return !own_densities_.contains(group.get()); };
  sharing_.clear();
  double density = 1;
  for (auto const& group : groups_) {
    if (!shares(group)) continue;
    density = group->density_of_all();
    sharing_.push_back({group->state().share, group->numel()});
  }
  if (density >= 1 || !sparsecomm::share_density(sharing_, density)) return;
  auto shared = sharing_.begin();
  for (auto const& group : groups_) {
    if (shares(group)) group->set_share((shared++)->share);
  }
}

std::optional<double> HookState::density_of(at::Tensor const& parameter) const {
  if (by_bucket_) return std::nullopt;
  auto const own = densities_.find(parameter.unsafeGetTensorImpl());
  if (own != densities_.end()) return own->second;
  if (parameter.dim() < options_.dense_below) return 1;
  return std::nullopt;
}

VelocityRule HookState::velocity_of(void const* parameter) const {
  auto const own = velocities_.find(parameter);
  return own == velocities_.end() ? options_.exchange.rule.velocity : own->second;
}

ExchangeOptions HookState::options_of(at::Tensor const& parameter) const {
  return options_at(density_of(parameter), velocity_of(parameter.unsafeGetTensorImpl()));
}

ExchangeOptions HookState::options_at(std::optional<double> density,
                                      VelocityRule const& velocity) const {
  ExchangeOptions options = options_.exchange;
  options.rule.velocity = velocity;
  if (!density) return options;
  options.density = *density;
  options.shares_density = false;
  if (*density < 1) return options;
  // Few, as a rule, so that messages count for more than bytes.
  options.algorithm = "dense_rabenseifner";
  options.feedback = true;
  options.collective.frame.value_codec = options.collective.dense_codec = ValueCodec::raw;
  options.rule = {.velocity = velocity, .mask_momentum = options.rule.mask_momentum};
  options.warmup = {};
  return options;
}

std::string HookState::key_of(at::Tensor const& parameter) {
  auto const place = places_.find(parameter.unsafeGetTensorImpl());
  if (place != places_.end()) return place->second.group->members()[place->second.member].key;
  auto const former = former_places_.find(parameter.unsafeGetTensorImpl());
  if (former != former_places_.end()) return former->second.key;
  auto const name = names_.find(parameter.unsafeGetTensorImpl());
  if (name != names_.end()) return name->second;
  require(names_.empty(), "a parameter of shape ", parameter.sizes(),
          " is not among the named parameters of this state: a state belongs to one model; make "
          "one per model");
  return concat("parameter.", unnamed_++);
}

// Where a gradient that is sparse itself comes among those whose norm is taken: from the end.
std::size_t HookState::order_of_sparse(at::Tensor const& parameter) {
  void const* const key = parameter.unsafeGetTensorImpl();
  auto const own = velocities_.find(key);
  require(own == velocities_.end() || own->second == VelocityRule(), "a parameter of shape ",
          parameter.sizes(),
          " has a sparse gradient, of which a state keeps nothing, and momentum ",
          own == velocities_.end() ? 0 : own->second.momentum,
          ": use sparse=False where it is looked up, or give its group momentum=0");
  if (!sparse_orders_.contains(key)) {
    require_of_model(parameter);
    parameters_.push_back(parameter);
    sparse_orders_.emplace(key, std::numeric_limits<std::size_t>::max() - sparse_orders_.size());
  }
  return sparse_orders_.at(key);
}

}  // namespace sparsecomm
