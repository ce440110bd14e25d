package preflight

import "slices"

// Checks returns the registry, in the order in which things depend on each other:
// what the machine is, its GPU from the bus upwards, the runtime, then disk, network
// and what is left of others.
func Checks() []Check {
	return slices.Concat(osChecks(), kernelChecks(), driverChecks(), deviceChecks(), toolkitChecks(), diskChecks(), networkChecks(),
		leftoverChecks(), capacityChecks(), packageChecks())
}
