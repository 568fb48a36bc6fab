/* In the place of pyxis: a SPANK plugin that takes its options and treats variables as pyxis does; the step
 * itself runs outside of any container. Its arguments in plugstack.conf, NAME=VALUE, are the image's own
 * environment: it wins over the job's, except for names that --container-env lists. What an option was given is in
 * STUB_IMAGE, STUB_MOUNTS ... of the task. Slurm's headers are not needed: what is used of spank.h stands here.
 *   gcc -shared -fPIC -DVERSION=0x160508 -o pyxis_stub.so pyxis_stub.c */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct spank_handle *spank_t;
struct spank_option {
	char *name, *arginfo, *usage;
	int has_arg, val;
	int (*cb)(int val, const char *arg, int remote);
};
extern int spank_option_register(spank_t sp, struct spank_option *opt);
extern int spank_setenv(spank_t sp, const char *name, const char *value, int overwrite);

const char plugin_name[] = "pyxis_stub";
const char plugin_type[] = "spank";
const unsigned int plugin_version = VERSION;
const unsigned int spank_plugin_version = 1;

static char *given[6];
static const char *shown[] = {"IMAGE", "MOUNTS", "ENV", "ENTRYPOINT", "HOME", "WORKDIR"};

static int take(int i, const char *arg, int remote)
{
	(void)remote;
	given[i] = strdup(arg && *arg ? arg : "given");
	return 0;
}

static struct spank_option options[] = {
	{"container-image", "IMAGE", "image", 1, 0, take},
	{"container-mounts", "SRC:DST", "mounts", 1, 1, take},
	{"container-env", "NAME[,NAME]", "variables that win over the image's", 1, 2, take},
	{"no-container-entrypoint", NULL, "no entrypoint", 0, 3, take},
	{"container-mount-home", NULL, "home directory", 0, 4, take},
	{"container-workdir", "PATH", "working directory", 1, 5, take},
};

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	size_t i;
	(void)ac, (void)av;
	for (i = 0; i < sizeof options / sizeof *options; i++)
		if (spank_option_register(sp, &options[i]))
			return -1;
	return 0;
}

static int listed(const char *name, size_t size)
{
	const char *at = given[2];
	for (; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
		if (strcspn(at, ",") == size && !strncmp(at, name, size))
			return 1;
	return 0;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	char name[256];
	int i;
	if (!given[0])
		return 0;
	for (i = 0; i < ac; i++) {
		size_t size = strcspn(av[i], "=");
		snprintf(name, sizeof name, "%.*s", (int)size, av[i]);
		if (!listed(name, size))
			spank_setenv(sp, name, av[i] + size + 1, 1);
	}
	for (i = 0; i < 6; i++)
		if (given[i]) {
			snprintf(name, sizeof name, "STUB_%s", shown[i]);
			spank_setenv(sp, name, given[i], 1);
		}
	return 0;
}
