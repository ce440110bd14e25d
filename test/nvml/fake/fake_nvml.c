// A stand-in for libnvidia-ml.so.1: it answers from a script and knows no GPU.
//
// The script is the file named by FAKE_NVML_SCRIPT, one statement a line:
//
//   SCOPE KEY VALUE
//
// SCOPE is "sys", a device's index, or "all" for every device without a line of its
// own. A device without a value for a question answers NOT_SUPPORTED, as GPUs do.
// Four keys steer a function instead of giving a fact ("*" stands for each function
// of a device):
//
//   SCOPE fail  FUNCTION CODE    return CODE
//   SCOPE hang  FUNCTION         never return
//   SCOPE crash FUNCTION         write to address 0
//   SCOPE sleep FUNCTION MS      return MS milliseconds later
//
// OLD_LIBRARY leaves out what drivers of the year 2018 did not have, NO_INIT leaves
// out nvmlInit itself.

#include <nvml.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_LINES = 4096, SYS = -1, MIG_BASE = 1000, MIG_MAX = 8 };

static struct line {
	char scope[8], key[64], value[192];
} lines[MAX_LINES];
static int line_count = -1;

static void load(void) {
	if (line_count >= 0) return;
	line_count = 0;
	const char *path = getenv("FAKE_NVML_SCRIPT");
	FILE *script = path ? fopen(path, "r") : NULL;
	if (!script) {
		fprintf(stderr, "fake nvml: no script in FAKE_NVML_SCRIPT\n");
		exit(90);
	}
	char text[512];
	while (fgets(text, sizeof text, script)) {
		struct line *l = &lines[line_count];
		l->value[0] = 0;
		if (text[0] == '#' || sscanf(text, "%7s %63s %191[^\n]", l->scope, l->key, l->value) < 2) continue;
		if (++line_count == MAX_LINES) break;
	}
	fclose(script);
}

static const char *find(const char *scope, const char *key) {
	for (int i = 0; i < line_count; i++)
		if (!strcmp(lines[i].scope, scope) && !strcmp(lines[i].key, key)) return lines[i].value;
	return NULL;
}

// value is the answer to a question about a device, or about the system.
static const char *value(int device, const char *key) {
	load();
	if (device == SYS) return find("sys", key);
	char scope[8];
	snprintf(scope, sizeof scope, "%d", device);
	const char *own = find(scope, key);
	return own ? own : find("all", key);
}

// enter does what the script has for a function before its answer.
static nvmlReturn_t enter(const char *function, int device) {
	load();
	char scope[8] = "sys";
	if (device != SYS) snprintf(scope, sizeof scope, "%d", device);
	for (int i = 0; i < line_count; i++) {
		struct line *l = &lines[i];
		if (strcmp(l->scope, scope) && (device == SYS || strcmp(l->scope, "all"))) continue;
		char name[96];
		int number = 0;
		if (sscanf(l->value, "%95s %d", name, &number) < 1) continue;
		if (strcmp(name, function) && (device == SYS || strcmp(name, "*"))) continue;
		if (!strcmp(l->key, "fail")) return number;
		if (!strcmp(l->key, "hang")) for (;;) pause();
		if (!strcmp(l->key, "crash")) *(volatile int *)0 = 1;
		if (!strcmp(l->key, "sleep")) {
			struct timespec t = {number / 1000, number % 1000 * 1000000L};
			nanosleep(&t, NULL);
		}
	}
	return NVML_SUCCESS;
}

static int index_of(nvmlDevice_t device) {
	int n = (int)(intptr_t)device - 1;
	return n >= MIG_BASE ? (n - MIG_BASE) / MIG_MAX : n;
}

// part_of is the number of the MIG device behind the handle, or -1.
static int part_of(nvmlDevice_t device) {
	int n = (int)(intptr_t)device - 1;
	return n >= MIG_BASE ? (n - MIG_BASE) % MIG_MAX : -1;
}

#define ENTER(device) \
	int n = (device); \
	nvmlReturn_t entered = enter(__func__, n); \
	if (entered != NVML_SUCCESS) return entered; \
	(void)n

// SCAN answers from the fields of one value.
#define SCAN(key, wanted, format, ...) \
	do { \
		const char *v = value(n, key); \
		if (!v || sscanf(v, format, __VA_ARGS__) < (wanted)) return NVML_ERROR_NOT_SUPPORTED; \
		return NVML_SUCCESS; \
	} while (0)

static nvmlReturn_t text(int device, const char *key, char *into, unsigned int length) {
	const char *v = value(device, key);
	if (!v) return NVML_ERROR_NOT_SUPPORTED;
	if (strlen(v) + 1 > length) return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(into, v);
	return NVML_SUCCESS;
}

// mig_field is field number FIELD of "NAME|UUID|BYTES" of one MIG device.
static nvmlReturn_t mig_field(nvmlDevice_t device, int field, char *into, unsigned int length) {
	char key[16], copy[192], *rest = copy, *part = NULL;
	snprintf(key, sizeof key, "mig%d", part_of(device));
	const char *v = value(index_of(device), key);
	if (!v) return NVML_ERROR_NOT_FOUND;
	strcpy(copy, v);
	for (int i = 0; i <= field; i++) part = strsep(&rest, "|");
	if (!part) return NVML_ERROR_NOT_SUPPORTED;
	if (strlen(part) + 1 > length) return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(into, part);
	return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result) {
	switch (result) {
	case NVML_SUCCESS: return "Success";
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
	case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
	case NVML_ERROR_NOT_FOUND: return "Not Found";
	case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case NVML_ERROR_TIMEOUT: return "Timeout";
	case NVML_ERROR_IRQ_ISSUE: return "Interrupt Request Issue";
	case NVML_ERROR_CORRUPTED_INFOROM: return "Corrupted infoROM";
	case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
	case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
	default: return "Unknown Error";
	}
}

#ifndef NO_INIT
nvmlReturn_t nvmlInit(void) { ENTER(SYS); return NVML_SUCCESS; }
nvmlReturn_t nvmlInit_v2(void) { ENTER(SYS); return NVML_SUCCESS; }
#endif
nvmlReturn_t nvmlShutdown(void) { ENTER(SYS); return NVML_SUCCESS; }

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) { ENTER(SYS); return text(n, "nvml", version, length); }
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) { ENTER(SYS); return text(n, "driver", version, length); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { ENTER(SYS); SCAN("cuda", 1, "%d", version); }
#ifndef OLD_LIBRARY
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { ENTER(SYS); SCAN("cuda", 1, "%d", version); }
#endif
nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
	ENTER(SYS);
	char key[32];
	snprintf(key, sizeof key, "pid%u", pid);
	return value(SYS, key) ? text(SYS, key, name, length) : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) { ENTER(SYS); SCAN("gpus", 1, "%u", count); }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
	ENTER((int)index);
	*device = (nvmlDevice_t)(intptr_t)(index + 1);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
	ENTER(index_of(device));
	return part_of(device) >= 0 ? mig_field(device, 0, name, length) : text(n, "name", name, length);
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
	ENTER(index_of(device));
	return part_of(device) >= 0 ? mig_field(device, 1, uuid, length) : text(n, "uuid", uuid, length);
}
nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length) { ENTER(index_of(device)); return text(n, "serial", serial, length); }
nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length) { ENTER(index_of(device)); return text(n, "vbios", version, length); }
nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand) { ENTER(index_of(device)); SCAN("brand", 1, "%u", (unsigned *)brand); }

static nvmlReturn_t pci_of(const char *bus, const char *id, nvmlPciInfo_t *pci) {
	memset(pci, 0, sizeof *pci);
	if (!bus || sscanf(bus, "%x:%x:%x.", &pci->domain, &pci->bus, &pci->device) < 3) return NVML_ERROR_NOT_SUPPORTED;
	snprintf(pci->busId, sizeof pci->busId, NVML_DEVICE_PCI_BUS_ID_FMT, NVML_DEVICE_PCI_BUS_ID_FMT_ARGS(pci));
	snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT, NVML_DEVICE_PCI_BUS_ID_FMT_ARGS(pci));
	if (id) pci->pciDeviceId = (unsigned int)strtoul(id, NULL, 16) << 16 | 0x10de;
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) { ENTER(index_of(device)); return pci_of(value(n, "bus"), value(n, "pciid"), pci); }
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) { ENTER(index_of(device)); SCAN("cc", 2, "%d %d", major, minor); }
nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode) { ENTER(index_of(device)); SCAN("virt", 1, "%u", (unsigned *)mode); }
nvmlReturn_t nvmlDeviceGetGridLicensableFeatures_v4(nvmlDevice_t device, nvmlGridLicensableFeatures_t *features) {
	ENTER(index_of(device));
	memset(features, 0, sizeof *features);
	features->isGridLicenseSupported = 1;
	features->licensableFeaturesCount = 1;
	features->gridLicensableFeatures[0].featureCode = NVML_GRID_LICENSE_FEATURE_CODE_COMPUTE;
	SCAN("licensed", 1, "%u", &features->gridLicensableFeatures[0].featureState);
}

// memory TOTAL RESERVED USED, in bytes.
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
	ENTER(index_of(device));
	unsigned long long total, reserved, used;
	if (part_of(device) >= 0) {
		char bytes[32];
		nvmlReturn_t found = mig_field(device, 2, bytes, sizeof bytes);
		if (found != NVML_SUCCESS) return found;
		memory->total = memory->free = strtoull(bytes, NULL, 10);
		memory->used = 0;
		return NVML_SUCCESS;
	}
	const char *v = value(n, "memory");
	if (!v || sscanf(v, "%llu %llu %llu", &total, &reserved, &used) < 3) return NVML_ERROR_NOT_SUPPORTED;
	memory->total = total;
	memory->used = used + reserved;
	memory->free = total - memory->used;
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar) {
	ENTER(index_of(device));
	memset(bar, 0, sizeof *bar);
	SCAN("bar1", 1, "%llu", &bar->bar1Total);
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending) {
	ENTER(index_of(device));
	SCAN("ecc", 2, "%u %u", (unsigned *)current, (unsigned *)pending);
}
// ecc_errors VOLATILE AGGREGATE, uncorrected.
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, unsigned long long *count) {
	ENTER(index_of(device));
	unsigned long long both[2];
	const char *v = value(n, "ecc_errors");
	if (!v || type != NVML_MEMORY_ERROR_TYPE_UNCORRECTED || sscanf(v, "%llu %llu", &both[0], &both[1]) < 2) return NVML_ERROR_NOT_SUPPORTED;
	*count = both[counter == NVML_AGGREGATE_ECC];
	return NVML_SUCCESS;
}
// retired SINGLE DOUBLE PENDING.
nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count, unsigned long long *addresses) {
	ENTER(index_of(device));
	unsigned int pages[2];
	const char *v = value(n, "retired");
	if (!v || sscanf(v, "%u %u", &pages[0], &pages[1]) < 2) return NVML_ERROR_NOT_SUPPORTED;
	unsigned int wanted = pages[cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR], room = *count;
	*count = wanted;
	if (wanted > room) return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned int i = 0; i < wanted; i++) addresses[i] = 0x1000ull * (i + 1);
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending) {
	ENTER(index_of(device));
	unsigned int single, doubled;
	SCAN("retired", 3, "%u %u %u", &single, &doubled, (unsigned *)pending);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) { ENTER(index_of(device)); SCAN("throttle", 1, "%llx", reasons); }
// temperature NOW SLOWDOWN SHUTDOWN, in degrees Celsius.
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius) { ENTER(index_of(device)); (void)sensor; SCAN("temperature", 1, "%u", celsius); }
nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t kind, unsigned int *celsius) {
	ENTER(index_of(device));
	unsigned int now, slowdown, shutdown;
	const char *v = value(n, "temperature");
	if (!v || sscanf(v, "%u %u %u", &now, &slowdown, &shutdown) < 3) return NVML_ERROR_NOT_SUPPORTED;
	*celsius = kind == NVML_TEMPERATURE_THRESHOLD_SHUTDOWN ? shutdown : slowdown;
	return NVML_SUCCESS;
}
// power NOW LIMIT, in milliwatts.
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *power) { ENTER(index_of(device)); SCAN("power", 1, "%u", power); }
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *limit) { ENTER(index_of(device)); unsigned int now; SCAN("power", 2, "%u %u", &now, limit); }

// pcie GENERATION MAX-GENERATION WIDTH MAX-WIDTH REPLAYS.
static nvmlReturn_t pcie(int device, int field, unsigned int *into) {
	unsigned int f[5];
	const char *v = value(device, "pcie");
	if (!v || sscanf(v, "%u %u %u %u %u", &f[0], &f[1], &f[2], &f[3], &f[4]) < 5) return NVML_ERROR_NOT_SUPPORTED;
	*into = f[field];
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned int *v) { ENTER(index_of(device)); return pcie(n, 0, v); }
nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *v) { ENTER(index_of(device)); return pcie(n, 1, v); }
nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *v) { ENTER(index_of(device)); return pcie(n, 2, v); }
nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned int *v) { ENTER(index_of(device)); return pcie(n, 3, v); }
nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned int *v) { ENTER(index_of(device)); return pcie(n, 4, v); }

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode) { ENTER(index_of(device)); SCAN("persistence", 1, "%u", (unsigned *)mode); }
nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode) { ENTER(index_of(device)); SCAN("compute_mode", 1, "%u", (unsigned *)mode); }

// nvlinks COUNT VERSION PEER: PEER is "switch" or the bus of the other GPU.
static int nvlinks(int device, unsigned int *version, char peer[32]) {
	unsigned int count;
	const char *v = value(device, "nvlinks");
	if (!v || sscanf(v, "%u %u %31s", &count, version, peer) < 3) return 0;
	return (int)count;
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active) {
	ENTER(index_of(device));
	unsigned int version;
	char peer[32];
	int count = nvlinks(n, &version, peer);
	if (!count) return NVML_ERROR_NOT_SUPPORTED;
	if ((int)link >= count) return NVML_ERROR_INVALID_ARGUMENT;
	const char *down = value(n, "nvlink_down");
	*active = !(down && atoi(down) == (int)link);
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version) {
	ENTER(index_of(device));
	char peer[32];
	return (int)link < nvlinks(n, version, peer) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci) {
	ENTER(index_of(device));
	unsigned int version;
	char peer[32];
	if ((int)link >= nvlinks(n, &version, peer)) return NVML_ERROR_INVALID_ARGUMENT;
	return pci_of(strcmp(peer, "switch") ? peer : "0000:05:00.0", NULL, pci);
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t *level) { ENTER(index_of(a)); (void)b; SCAN("topology", 1, "%u", (unsigned *)level); }
// p2p READ NVLINK: the two states.
nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t which, nvmlGpuP2PStatus_t *status) {
	ENTER(index_of(a));
	(void)b;
	unsigned int states[2];
	const char *v = value(n, "p2p");
	if (!v || sscanf(v, "%u %u", &states[0], &states[1]) < 2) return NVML_ERROR_NOT_SUPPORTED;
	*status = states[which == NVML_P2P_CAPS_INDEX_NVLINK];
	return NVML_SUCCESS;
}

// process PID BYTES KIND ("compute", "graphics" or "mps"); BYTES is -1 where the
// driver does not say. process1 to process9 are further ones.
static unsigned int processes(int device, const char *kind, nvmlProcessInfo_t *infos, unsigned int room) {
	unsigned int count = 0;
	for (int i = 0; i < 10; i++) {
		char key[16] = "process", is[16];
		unsigned int pid;
		long long bytes;
		if (i) snprintf(key, sizeof key, "process%d", i);
		const char *v = value(device, key);
		if (!v || sscanf(v, "%u %lld %15s", &pid, &bytes, is) < 3 || strcmp(is, kind)) continue;
		if (count < room) infos[count] = (nvmlProcessInfo_t){.pid = pid, .usedGpuMemory = (unsigned long long)bytes, .gpuInstanceId = ~0u, .computeInstanceId = ~0u};
		count++;
	}
	return count;
}

#ifdef OLD_LIBRARY
static nvmlReturn_t list_v1(int device, const char *kind, unsigned int *count, nvmlProcessInfo_v1_t *infos) {
	nvmlProcessInfo_t wide[10];
	unsigned int room = *count;
	*count = processes(device, kind, wide, 10);
	if (*count > room) return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned int i = 0; i < *count; i++) infos[i] = (nvmlProcessInfo_v1_t){wide[i].pid, wide[i].usedGpuMemory};
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos) { ENTER(index_of(device)); return list_v1(n, "compute", count, infos); }
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos) { ENTER(index_of(device)); return list_v1(n, "graphics", count, infos); }
#else
static nvmlReturn_t list(int device, const char *kind, unsigned int *count, nvmlProcessInfo_t *infos) {
	unsigned int room = *count;
	*count = processes(device, kind, infos, room);
	return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) { ENTER(index_of(device)); return list(n, "compute", count, infos); }
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) { ENTER(index_of(device)); return list(n, "graphics", count, infos); }
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) { ENTER(index_of(device)); return list(n, "mps", count, infos); }

nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version) { ENTER(index_of(device)); return text(n, "gsp", version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE); }
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
	ENTER(index_of(device));
	if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	unsigned long long total, reserved, used;
	const char *v = value(n, "memory");
	if (!v || sscanf(v, "%llu %llu %llu", &total, &reserved, &used) < 3) return NVML_ERROR_NOT_SUPPORTED;
	memory->total = total;
	memory->reserved = reserved;
	memory->used = used;
	memory->free = total - reserved - used;
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) { ENTER(index_of(device)); SCAN("mig", 2, "%u %u", current, pending); }
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) { ENTER(index_of(device)); *count = value(n, "mig") ? 7 : 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *part) {
	ENTER(index_of(device));
	char key[16];
	snprintf(key, sizeof key, "mig%u", index);
	if (!value(n, key)) return NVML_ERROR_NOT_FOUND;
	*part = (nvmlDevice_t)(intptr_t)(MIG_BASE + n * MIG_MAX + (int)index + 1);
	return NVML_SUCCESS;
}
// remap CORRECTABLE UNCORRECTABLE PENDING FAILURE.
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending, unsigned int *failure) {
	ENTER(index_of(device));
	SCAN("remap", 4, "%u %u %u %u", corrected, uncorrected, pending, failure);
}
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) { ENTER(index_of(device)); SCAN("throttle", 1, "%llx", reasons); }
nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *set, nvmlAffinityScope_t scope) {
	ENTER(index_of(device));
	(void)scope;
	memset(set, 0, size * sizeof *set);
	unsigned int node;
	const char *v = value(n, "numa");
	if (!v || sscanf(v, "%u", &node) < 1) return NVML_ERROR_NOT_SUPPORTED;
	set[node / 64] = 1ul << node % 64;
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type) {
	ENTER(index_of(device));
	unsigned int version;
	char peer[32];
	if ((int)link >= nvlinks(n, &version, peer)) return NVML_ERROR_INVALID_ARGUMENT;
	*type = strcmp(peer, "switch") ? NVML_NVLINK_DEVICE_TYPE_GPU : NVML_NVLINK_DEVICE_TYPE_SWITCH;
	return NVML_SUCCESS;
}
// fabric STATE STATUS CLIQUE.
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info) {
	ENTER(index_of(device));
	if (info->version != nvmlGpuFabricInfo_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	unsigned int state, status, clique;
	const char *v = value(n, "fabric");
	if (!v || sscanf(v, "%u %u %u", &state, &status, &clique) < 3) return NVML_ERROR_NOT_SUPPORTED;
	info->state = (unsigned char)state;
	info->status = status;
	info->cliqueId = clique;
	return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
	ENTER(index_of(device));
	(void)info;
	return NVML_ERROR_NOT_SUPPORTED;
}
#endif
