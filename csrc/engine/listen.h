// How ranks wait for one another's news, without using a core.
#pragma once

#include <vector>

#include "collectives/channel.h"
#include "engine/comparison.h"
#include "engine/pending_list.h"

namespace sparsecomm {

// Idles until this rank has something new to say, something of it is late, or another rank rings;
// then wakes the others: rank + 2^i, who do the same. `candidates`: scratch.
void listen(Channel& channel, PendingList& pending, Comparison const& comparison,
            std::vector<PendingList::Iterator>& candidates);

}  // namespace sparsecomm
