// A stand-in for nvidia-smi: it asks the NVML that the dynamic loader finds, as the
// real one does, and says what it finds. Without that library it fails, which is how
// a container shows that the driver was not handed in.
//
//   nvidia-smi                                     a line for each GPU
//   nvidia-smi -L                                  the same
//   nvidia-smi --query-gpu=FIELDS --format=csv,noheader,nounits
//
// FIELDS are index, uuid, name, pci.bus_id, memory.total (MiB), driver_version.

#include <dlfcn.h>
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *library;

static void *function(const char *name) {
	void *f = dlsym(library, name);
	if (!f) {
		fprintf(stderr, "nvidia-smi (stand-in): %s\n", dlerror());
		exit(2);
	}
	return f;
}

static void check(nvmlReturn_t result, const char *what) {
	if (result == NVML_SUCCESS) return;
	fprintf(stderr, "nvidia-smi (stand-in): %s: error %d\n", what, (int)result);
	exit(9);
}

#define CALL(name, type, ...) check(((nvmlReturn_t(*) type)function(name))(__VA_ARGS__), name)

static void field(const char *name, unsigned int index, nvmlDevice_t device) {
	char text[96];
	nvmlPciInfo_t pci;
	nvmlMemory_t memory;
	if (!strcmp(name, "index")) {
		printf("%u", index);
	} else if (!strcmp(name, "uuid")) {
		CALL("nvmlDeviceGetUUID", (nvmlDevice_t, char *, unsigned int), device, text, sizeof text);
		printf("%s", text);
	} else if (!strcmp(name, "name")) {
		CALL("nvmlDeviceGetName", (nvmlDevice_t, char *, unsigned int), device, text, sizeof text);
		printf("%s", text);
	} else if (!strcmp(name, "pci.bus_id")) {
		CALL("nvmlDeviceGetPciInfo_v3", (nvmlDevice_t, nvmlPciInfo_t *), device, &pci);
		printf("%s", pci.busId);
	} else if (!strcmp(name, "memory.total")) {
		CALL("nvmlDeviceGetMemoryInfo", (nvmlDevice_t, nvmlMemory_t *), device, &memory);
		printf("%llu", memory.total >> 20);
	} else if (!strcmp(name, "driver_version")) {
		CALL("nvmlSystemGetDriverVersion", (char *, unsigned int), text, sizeof text);
		printf("%s", text);
	} else {
		fprintf(stderr, "nvidia-smi (stand-in): it does not know the field %s\n", name);
		exit(2);
	}
}

int main(int argc, char **argv) {
	const char *query = NULL;
	for (int i = 1; i < argc; i++) {
		if (!strncmp(argv[i], "--query-gpu=", 12)) query = argv[i] + 12;
		else if (strcmp(argv[i], "-L") && strcmp(argv[i], "--format=csv,noheader,nounits")) {
			fprintf(stderr, "nvidia-smi (stand-in): it does not know %s\n", argv[i]);
			return 2;
		}
	}
	if (!(library = dlopen("libnvidia-ml.so.1", RTLD_NOW))) {
		fprintf(stderr, "nvidia-smi (stand-in): %s\n", dlerror());
		return 12;
	}
	CALL("nvmlInit_v2", (void));
	unsigned int count;
	CALL("nvmlDeviceGetCount_v2", (unsigned int *), &count);
	if (!count) {
		puts("No devices were found");
		return 6;
	}
	for (unsigned int i = 0; i < count; i++) {
		nvmlDevice_t device;
		CALL("nvmlDeviceGetHandleByIndex_v2", (unsigned int, nvmlDevice_t *), i, &device);
		if (!query) {
			printf("GPU %u: ", i);
			field("name", i, device);
			printf(" (UUID: ");
			field("uuid", i, device);
			puts(")");
			continue;
		}
		char copy[256], *rest = copy, *name;
		snprintf(copy, sizeof copy, "%s", query);
		for (int first = 1; (name = strsep(&rest, ",")); first = 0) {
			if (!first) printf(", ");
			field(name, i, device);
		}
		putchar('\n');
	}
	return 0;
}
