/* A libnvidia-ml.so.1 that returns the values of a scenario file.
 *
 * FAKE_NVML_SCENARIO names the file; it is read again whenever it has been replaced, so that a test
 * changes what is true by renaming a new file over it. One line is one fact; see __init__.py.
 *
 * What the scenario does not mention is NVML_ERROR_NOT_SUPPORTED, as on a GPU that lacks it.
 */
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25,
};

enum { MAX_GPUS = 16, MAX_INSTANCES = 7, MAX_FACTS = 128, MAX_ITEMS = 64, TEXT = 96 };

typedef struct {
    char key[TEXT];
    char value[TEXT];
} Fact;

typedef struct {
    unsigned pid;
    unsigned long long bytes;
    unsigned instance;
} Process;

/* A GPU, or a MIG instance of the GPU that `parent` points to. */
typedef struct Device {
    struct Device *parent;
    unsigned index;
    int fact_count;
    Fact facts[MAX_FACTS];
    int process_count;
    Process processes[MAX_ITEMS];
    int xid_count;
    unsigned long long xids[MAX_ITEMS];
    /* The scenario's events are a list that only grows; this is how many have been delivered. */
    int xids_delivered;
} Device;

/* Static, so that handles stay what they are when the scenario is read again. */
static Device gpus[MAX_GPUS];
static Device instances[MAX_GPUS][MAX_INSTANCES];
static unsigned gpu_count;
static char driver_version[TEXT];
static int initialised, driver_error;
static struct stat last_seen;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void clear(Device *device, Device *parent, unsigned index)
{
    device->parent = parent;
    device->index = index;
    device->fact_count = device->process_count = device->xid_count = 0;
}

static void parse(FILE *file)
{
    char line[512];
    Device *device = NULL, *gpu = NULL;
    gpu_count = 0;
    for (unsigned i = 0; i < MAX_GPUS * MAX_INSTANCES; i++)
        instances[i / MAX_INSTANCES][i % MAX_INSTANCES].parent = NULL;
    driver_error = SUCCESS;
    while (fgets(line, sizeof line, file)) {
        char key[TEXT];
        int length = 0;
        if (sscanf(line, " %95s %n", key, &length) != 1 || key[0] == '#')
            continue;
        char *value = line + length;
        value[strcspn(value, "\n")] = 0;
        if (!strcmp(key, "driver")) {
            snprintf(driver_version, TEXT, "%s", value);
        } else if (!strcmp(key, "driver_error")) {
            driver_error = atoi(value);
        } else if (!strcmp(key, "gpu") && gpu_count < MAX_GPUS) {
            device = gpu = &gpus[gpu_count];
            clear(device, NULL, gpu_count++);
        } else if (!strcmp(key, "mig") && gpu && (unsigned)atoi(value) < MAX_INSTANCES) {
            device = &instances[gpu->index][atoi(value)];
            clear(device, gpu, (unsigned)atoi(value));
        } else if (!device) {
            fprintf(stderr, "fake nvml: %s comes before the first gpu\n", key);
            abort();
        } else if (!strcmp(key, "process") && device->process_count < MAX_ITEMS) {
            Process *process = &device->processes[device->process_count++];
            process->instance = UINT_MAX;
            sscanf(value, "%u %llu %u", &process->pid, &process->bytes, &process->instance);
        } else if (!strcmp(key, "xid") && device->xid_count < MAX_ITEMS) {
            device->xids[device->xid_count++] = strtoull(value, NULL, 10);
        } else if (device->fact_count < MAX_FACTS) {
            Fact *fact = &device->facts[device->fact_count++];
            snprintf(fact->key, TEXT, "%s", key);
            snprintf(fact->value, TEXT, "%s", value);
        }
    }
}

static void refresh(void)
{
    const char *path = getenv("FAKE_NVML_SCENARIO");
    struct stat now;
    if (!path || stat(path, &now)) {
        driver_error = DRIVER_NOT_LOADED;
        return;
    }
    if (now.st_ino == last_seen.st_ino && now.st_mtim.tv_sec == last_seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == last_seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    parse(file);
    fclose(file);
    last_seen = now;
}

static const char *text(const Device *device, const char *key)
{
    for (int i = 0; i < device->fact_count; i++)
        if (!strcmp(device->facts[i].key, key))
            return device->facts[i].value;
    return NULL;
}

/* A fact, or the error that stands in its place: "!15" is NVML_ERROR_GPU_IS_LOST. */
static int look(const Device *device, const char *key, const char **found)
{
    *found = text(device, key);
    if (!*found)
        return NOT_SUPPORTED;
    return (*found)[0] == '!' ? atoi(*found + 1) : SUCCESS;
}

static int number(const Device *device, const char *key, unsigned long long *value)
{
    const char *found;
    int result = look(device, key, &found);
    if (result == SUCCESS)
        *value = strtoull(found, NULL, 0);
    return result;
}

static int small(const Device *device, const char *key, unsigned *value)
{
    unsigned long long wide;
    int result = number(device, key, &wide);
    if (result == SUCCESS)
        *value = (unsigned)wide;
    return result;
}

static int words(const Device *device, const char *key, char *out, unsigned size)
{
    const char *found;
    int result = look(device, key, &found);
    if (result == SUCCESS && (unsigned)snprintf(out, size, "%s", found) >= size)
        return INSUFFICIENT_SIZE;
    return result;
}

static void rest(long milliseconds)
{
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

/* What every call does first: see the newest scenario, and be as slow, stuck or lost as it says. */
static int enter(Device *device, const char *function)
{
    pthread_mutex_lock(&mutex);
    refresh();
    const Device *gpu = device && device->parent ? device->parent : device;
    while (gpu && text(gpu, "hang") && !strcmp(text(gpu, "hang"), function)) {
        pthread_mutex_unlock(&mutex);
        rest(10);
        pthread_mutex_lock(&mutex);
        refresh();
    }
    if (gpu && text(gpu, "delay_ms")) {
        long milliseconds = atol(text(gpu, "delay_ms"));
        pthread_mutex_unlock(&mutex);
        rest(milliseconds);
        pthread_mutex_lock(&mutex);
    }
    if (!initialised)
        return UNINITIALIZED;
    if (driver_error)
        return driver_error;
    return gpu && text(gpu, "lost") ? GPU_IS_LOST : SUCCESS;
}

static int leave(int result)
{
    pthread_mutex_unlock(&mutex);
    return result;
}

#define CALL(device, expression)                 \
    do {                                         \
        int result_ = enter(device, __func__);   \
        if (result_ == SUCCESS)                  \
            result_ = (expression);              \
        return leave(result_);                   \
    } while (0)

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&mutex);
    refresh();
    initialised = driver_error == SUCCESS;
    return leave(driver_error);
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    pthread_mutex_lock(&mutex);
    initialised = 0;
    return leave(SUCCESS);
}

const char *nvmlErrorString(int result)
{
    return result == SUCCESS ? "Success" : "scripted error";
}

static int copy(const char *from, char *out, unsigned size)
{
    return (unsigned)snprintf(out, size, "%s", from) < size ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { CALL(NULL, copy(driver_version, out, size)); }

static int set(unsigned *out, unsigned value)
{
    *out = value;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) { CALL(NULL, set(count, gpu_count)); }

static int handle_of(unsigned index, Device **out)
{
    if (index >= gpu_count)
        return INVALID_ARGUMENT;
    *out = &gpus[index];
    const char *found;
    int result = look(*out, "handle", &found);
    return result == NOT_SUPPORTED ? SUCCESS : result;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) { CALL(NULL, handle_of(index, out)); }

int nvmlDeviceGetUUID(Device *device, char *out, unsigned size) { CALL(device, words(device, "uuid", out, size)); }
int nvmlDeviceGetName(Device *device, char *out, unsigned size) { CALL(device, words(device, "name", out, size)); }

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} Pci;

static int pci(const Device *device, Pci *out)
{
    memset(out, 0, sizeof *out);
    return words(device, "pci_bus_id", out->bus_id, sizeof out->bus_id);
}

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *out) { CALL(device, pci(device, out)); }

typedef struct {
    unsigned gpu, memory;
} Utilization;

static int utilization(const Device *device, Utilization *out)
{
    out->memory = 0;
    return small(device, "utilization_percent", &out->gpu);
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) { CALL(device, utilization(device, out)); }

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;

/* The first version counts as used what the driver reserves, the second reports it separately. */
static int memory_v2(const Device *device, MemoryV2 *out)
{
    if (out->version != 0x02000028)
        return VERSION_MISMATCH;
    int result = number(device, "memory_total_bytes", &out->total);
    if (result == SUCCESS)
        result = number(device, "memory_used_bytes", &out->used);
    if (result == SUCCESS && number(device, "memory_reserved_bytes", &out->reserved) != SUCCESS)
        out->reserved = 0;
    if (result == SUCCESS)
        out->free = out->total - out->used - out->reserved;
    return result;
}

static int memory(const Device *device, Memory *out)
{
    MemoryV2 all = {.version = 0x02000028};
    int result = memory_v2(device, &all);
    if (result == SUCCESS)
        *out = (Memory){all.total, all.free, all.used + all.reserved};
    return result;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *out) { CALL(device, memory(device, out)); }
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) { CALL(device, memory_v2(device, out)); }

int nvmlDeviceGetPowerUsage(Device *device, unsigned *out) { CALL(device, small(device, "power_mw", out)); }

int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *out)
{
    CALL(device, number(device, "energy_mj", out));
}

static int clock_mhz(const Device *device, unsigned domain, unsigned *out)
{
    static const char *const keys[] = {"graphics_mhz", "sm_mhz", "memory_mhz", "video_mhz"};
    return domain < 4 ? small(device, keys[domain], out) : INVALID_ARGUMENT;
}

int nvmlDeviceGetClockInfo(Device *device, unsigned domain, unsigned *out) { CALL(device, clock_mhz(device, domain, out)); }

typedef struct {
    unsigned version, sensor;
    int celsius;
} TemperatureV1;

static int temperature_v(const Device *device, TemperatureV1 *out)
{
    if (out->version != 0x0100000C)
        return VERSION_MISMATCH;
    return out->sensor == 0 ? small(device, "temperature_celsius", (unsigned *)&out->celsius) : INVALID_ARGUMENT;
}

int nvmlDeviceGetTemperatureV(Device *device, TemperatureV1 *out) { CALL(device, temperature_v(device, out)); }

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *out)
{
    CALL(device, sensor == 0 ? small(device, "temperature_celsius", out) : INVALID_ARGUMENT);
}

static int reasons(const Device *device, const char *key, unsigned long long *out) { return number(device, key, out); }

int nvmlDeviceGetSupportedClocksEventReasons(Device *device, unsigned long long *out)
{
    CALL(device, reasons(device, "reasons_supported", out));
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *out)
{
    CALL(device, reasons(device, "reasons", out));
}

int nvmlDeviceGetSupportedClocksThrottleReasons(Device *device, unsigned long long *out)
{
    CALL(device, reasons(device, "reasons_supported", out));
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *out)
{
    CALL(device, reasons(device, "reasons", out));
}

static int ecc(const Device *device, unsigned type, unsigned scope, unsigned long long *out)
{
    static const char *const keys[2][2] = {
        {"ecc_corrected_volatile", "ecc_corrected_aggregate"},
        {"ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"},
    };
    return type < 2 && scope < 2 ? number(device, keys[type][scope], out) : INVALID_ARGUMENT;
}

int nvmlDeviceGetTotalEccErrors(Device *device, unsigned type, unsigned scope, unsigned long long *out)
{
    CALL(device, ecc(device, type, scope, out));
}

static int remapped(const Device *device, unsigned out[4])
{
    const char *found;
    int result = look(device, "remapped", &found);
    if (result == SUCCESS && sscanf(found, "%u %u %u %u", &out[0], &out[1], &out[2], &out[3]) != 4)
        return INVALID_ARGUMENT;
    return result;
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure)
{
    unsigned rows[4] = {0};
    int result = enter(device, __func__);
    if (result == SUCCESS)
        result = remapped(device, rows);
    *corrected = rows[0], *uncorrected = rows[1], *pending = rows[2], *failure = rows[3];
    return leave(result);
}

typedef struct {
    unsigned pid;
    unsigned long long bytes;
    unsigned instance, compute;
} ProcessInfo;

static int processes(const Device *device, unsigned *count, ProcessInfo *out)
{
    const char *found;
    int result = look(device, "processes", &found);
    if (result != SUCCESS && result != NOT_SUPPORTED)
        return result;
    unsigned room = *count, have = (unsigned)device->process_count;
    *count = have;
    if (room < have)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < have; i++) {
        const Process *process = &device->processes[i];
        out[i] = (ProcessInfo){process->pid, process->bytes, process->instance, UINT_MAX};
    }
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device *device, unsigned *count, ProcessInfo *out)
{
    CALL(device, processes(device, count, out));
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *out)
{
    CALL(device, processes(device, count, out));
}

typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type;
    int result;
    union {
        double real;
        unsigned narrow;
        unsigned long long wide;
    } value;
} Field;

/* "field.138.all ull:12345": the type is u32, ull or double, the scope a link or all of them. */
static int field(const Device *device, Field *out)
{
    char key[TEXT];
    const char *found;
    if (out->scope == UINT_MAX)
        snprintf(key, TEXT, "field.%u.all", out->id);
    else
        snprintf(key, TEXT, "field.%u", out->id);
    int result = look(device, key, &found);
    if (result != SUCCESS)
        return result;
    if (sscanf(found, "double:%lf", &out->value.real) == 1)
        out->type = 0;
    else if (sscanf(found, "u32:%u", &out->value.narrow) == 1)
        out->type = 1;
    else if (sscanf(found, "ull:%llu", &out->value.wide) == 1)
        out->type = 3;
    else
        return INVALID_ARGUMENT;
    return SUCCESS;
}

static int fields(const Device *device, int count, Field *out)
{
    for (int i = 0; i < count; i++)
        out[i].result = field(device, &out[i]);
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(Device *device, int count, Field *out) { CALL(device, fields(device, count, out)); }

/* MIG */

static int mig_mode(const Device *device, unsigned *current, unsigned *pending)
{
    int result = small(device, "mig_mode", current);
    *pending = *current;
    return result;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) { CALL(device, mig_mode(device, current, pending)); }
int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) { CALL(device, set(count, MAX_INSTANCES)); }

static int instance(const Device *device, unsigned index, Device **out)
{
    if (index >= MAX_INSTANCES || !instances[device->index][index].parent)
        return NOT_FOUND;
    *out = &instances[device->index][index];
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out)
{
    CALL(device, instance(device, index, out));
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *out) { CALL(device, small(device, "gpu_instance", out)); }

/* Events: one set listens to one GPU or more, and delivers what the scenario has listed since. */

typedef struct {
    Device *members[MAX_GPUS];
    int count;
} EventSet;

typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} Event;

enum { XID_EVENT = 8 };

int nvmlDeviceGetSupportedEventTypes(Device *device, unsigned long long *out)
{
    CALL(device, number(device, "event_types", out));
}

int nvmlEventSetCreate(EventSet **out)
{
    *out = calloc(1, sizeof **out);
    return *out ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlEventSetFree(EventSet *set)
{
    free(set);
    return SUCCESS;
}

static int listen(Device *device, unsigned long long types, EventSet *set)
{
    if (types != XID_EVENT || set->count == MAX_GPUS)
        return INVALID_ARGUMENT;
    set->members[set->count++] = device;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) { CALL(device, listen(device, types, set)); }

static int deliver(EventSet *set, Event *out)
{
    int result = TIMEOUT;
    for (int i = 0; i < set->count; i++) {
        Device *device = set->members[i];
        if (device->xids_delivered < device->xid_count) {
            *out = (Event){device, XID_EVENT, device->xids[device->xids_delivered++], UINT_MAX, UINT_MAX};
            return SUCCESS;
        }
        if (text(device, "lost"))
            result = GPU_IS_LOST;
    }
    return result;
}

int nvmlEventSetWait_v2(EventSet *set, Event *out, unsigned timeout_ms)
{
    int result = enter(NULL, __func__);
    if (result == SUCCESS)
        result = deliver(set, out);
    leave(result);
    if (result == TIMEOUT)
        rest(timeout_ms);
    return result;
}

/* GPM: a sample remembers what it was taken from; metrics need two of the same. */

typedef struct {
    const Device *source;
} Sample;

typedef struct {
    unsigned version, supported;
} GpmSupport;

typedef struct {
    unsigned metric;
    int result;
    double value;
    const char *names[3];
} GpmMetric;

typedef struct {
    unsigned version, count;
    Sample *first, *second;
    GpmMetric metrics[];
} GpmRequest;

static int gpm_support(const Device *device, GpmSupport *out)
{
    if (out->version != 1)
        return VERSION_MISMATCH;
    if (small(device, "gpm", &out->supported) != SUCCESS)
        out->supported = 0;
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(Device *device, GpmSupport *out) { CALL(device, gpm_support(device, out)); }

int nvmlGpmSampleAlloc(Sample **out)
{
    *out = calloc(1, sizeof **out);
    return *out ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlGpmSampleFree(Sample *sample)
{
    free(sample);
    return SUCCESS;
}

static int gpm_take(const Device *source, Sample *sample)
{
    sample->source = source;
    unsigned mode;
    /* A GPU that is cut up has samples of its instances only. */
    if (!source->parent && small(source, "mig_mode", &mode) == SUCCESS && mode)
        return NOT_SUPPORTED;
    return SUCCESS;
}

int nvmlGpmSampleGet(Device *device, Sample *sample) { CALL(device, gpm_take(device, sample)); }

static int gpm_take_instance(const Device *device, unsigned id, Sample *sample)
{
    for (unsigned i = 0; i < MAX_INSTANCES; i++) {
        const Device *candidate = &instances[device->index][i];
        unsigned own;
        if (candidate->parent && small(candidate, "gpu_instance", &own) == SUCCESS && own == id)
            return gpm_take(candidate, sample);
    }
    return NOT_FOUND;
}

int nvmlGpmMigSampleGet(Device *device, unsigned id, Sample *sample) { CALL(device, gpm_take_instance(device, id, sample)); }

static int gpm_metrics(GpmRequest *request)
{
    const Device *source = request->first->source;
    if (request->version != 1)
        return VERSION_MISMATCH;
    if (!source || source != request->second->source || request->first == request->second)
        return INVALID_ARGUMENT;
    for (unsigned i = 0; i < request->count; i++) {
        GpmMetric *metric = &request->metrics[i];
        char key[TEXT];
        const char *found;
        snprintf(key, TEXT, "gpm.%u", metric->metric);
        metric->result = look(source, key, &found);
        if (metric->result == SUCCESS)
            metric->value = strtod(found, NULL);
    }
    return SUCCESS;
}

int nvmlGpmMetricsGet(GpmRequest *request) { CALL(NULL, gpm_metrics(request)); }
