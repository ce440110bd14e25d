// A stand-in for libnvidia-ml.so.1 on a node without a GPU: the script-driven library
// of test/nvml, which answers what llmbox asks, and here what NVIDIA's device plugin
// and GPU feature discovery ask beside it. Its GPUs never fail and know no partitions.

#include "../../nvml/fake/fake_nvml.c"

// Programs that find the library do not know of a script.
__attribute__((constructor)) static void name_the_script(void) {
	setenv("FAKE_NVML_SCRIPT", "/usr/share/nvml-standin/gpus.nvml", 0);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { (void)flags; return nvmlInit_v2(); }

static int gpus(void) {
	const char *v = value(SYS, "gpus");
	return v ? atoi(v) : 0;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) { ENTER(index_of(device)); *index = (unsigned int)n; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) { ENTER(index_of(device)); *minor = (unsigned int)n; return NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
	ENTER(SYS);
	for (int i = 0; i < gpus(); i++) {
		const char *own = value(i, "uuid");
		if (own && !strcmp(own, uuid)) {
			*device = (nvmlDevice_t)(intptr_t)(i + 1);
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device) {
	ENTER(SYS);
	nvmlPciInfo_t wanted, own;
	if (pci_of(bus, NULL, &wanted) != NVML_SUCCESS) return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0; i < gpus(); i++)
		if (pci_of(value(i, "bus"), NULL, &own) == NVML_SUCCESS && !strcmp(own.busId, wanted.busId)) {
			*device = (nvmlDevice_t)(intptr_t)(i + 1);
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *architecture) {
	ENTER(index_of(device));
	int major, minor;
	const char *v = value(n, "cc");
	if (!v || sscanf(v, "%d %d", &major, &minor) < 2) return NVML_ERROR_NOT_SUPPORTED;
	*architecture = major == 7 ? NVML_DEVICE_ARCH_TURING
		: major == 8 ? (minor == 9 ? NVML_DEVICE_ARCH_ADA : NVML_DEVICE_ARCH_AMPERE)
		: major == 9 ? NVML_DEVICE_ARCH_HOPPER : NVML_DEVICE_ARCH_UNKNOWN;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int size, unsigned long *set) {
	ENTER(index_of(device));
	memset(set, 0xff, size * sizeof *set);
	return NVML_SUCCESS;
}

// No device is part of another.
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is) { ENTER(index_of(device)); *is = part_of(device) >= 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t part, nvmlDevice_t *device) { (void)part; (void)device; return NVML_ERROR_NOT_SUPPORTED; }
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) { (void)device; (void)id; return NVML_ERROR_NOT_SUPPORTED; }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) { (void)device; (void)id; return NVML_ERROR_NOT_SUPPORTED; }
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) { (void)device; (void)attributes; return NVML_ERROR_NOT_SUPPORTED; }

// Events can be waited for; none comes.
nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
	ENTER(index_of(device));
	*types = nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeSingleBitEccError;
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
	static int one;
	*set = (nvmlEventSet_t)&one;
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) { ENTER(index_of(device)); (void)types; (void)set; return NVML_SUCCESS; }
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds) {
	(void)set;
	(void)data;
	struct timespec t = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
	nanosleep(&t, NULL);
	return NVML_ERROR_TIMEOUT;
}
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { (void)set; return NVML_SUCCESS; }
