// A stand-in for libcuda.so.1 of one driver version, made for a test. No CUDA is in it.
//
// cuInit returns the number in the file cuinit of the played machine (PLAYED_GPUS, else /srv/replay), where there is one.
// Without it: 100 when no driver is loaded, 803 when one of another version is, 802 when there are NVSwitches and no Fabric Manager
// runs, else 0 (CUresult of cuda.h). Built without the C library's headers and start files, so that a compiler alone is
// enough.
typedef struct file file;
file *fopen(const char *, const char *);
int fscanf(file *, const char *, ...);
int fclose(file *);
unsigned long fread(void *, unsigned long, unsigned long, file *);
char *strstr(const char *, const char *);
int scandir(const char *, void ***, void *, void *);
int kill(int, int);
char *getenv(const char *);
int snprintf(char *, unsigned long, const char *, ...);

static char path[4096];

static const char *played(const char *name)
{
	const char *folder = getenv("PLAYED_GPUS");
	snprintf(path, sizeof path, "%s/%s", folder ? folder : "/srv/replay", name);
	return path;
}

static int number(const char *where, int otherwise)
{
	int value = otherwise;
	file *from = fopen(where, "r");
	if (from) {
		if (fscanf(from, "%d", &value) != 1)
			value = otherwise;
		fclose(from);
	}
	return value;
}

int cuInit(unsigned int flags)
{
	char text[512] = "";
	int manager, switches, told = number(played("cuinit"), -1);
	void **names;
	file *from;
	(void)flags;
	if (told >= 0)
		return told;
	from = fopen(played("proc/driver/nvidia/version"), "r");
	if (!from)
		return 100;
	text[fread(text, 1, sizeof text - 1, from)] = 0;
	fclose(from);
	if (!strstr(text, "  " STAND_IN_VERSION "  "))
		return 803;
	switches = scandir(played("proc/driver/nvidia-nvswitch/devices"), &names, 0, 0) - 2; /* less . and .. */
	manager = number("/run/nvidia-fabricmanager/nv-fabricmanager.pid", 0);
	if (switches > 0 && (manager <= 0 || kill(manager, 0) != 0))
		return 802;
	return 0;
}

int cuDriverGetVersion(int *version)
{
	*version = 13000;
	return 0;
}

int cuDeviceGetCount(int *count)
{
	*count = number(played("cuda_devices"), 0);
	return 0;
}
