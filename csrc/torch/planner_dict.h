// Plans and figures as Python sees them.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "engine/planner.h"

namespace sparsecomm {

class Communicator;

pybind11::dict to_dict(PlanState const& state);
// Throws InvalidArgument where a name or a number is none.
PlanState plan_from_dict(pybind11::handle const& saved);

// Measures on first use; collective.
std::map<std::string, double> figures_of(Communicator& communicator);

}  // namespace sparsecomm
