/* Hide feature bits in the results of CPUID. In a copy of the library, edgeq has replaced each CPUID instruction
 * (0F A2) by UD0 (0F FF), which every x86 CPU refuses. The signal handler in this file runs the real CPUID, clears the
 * bits, and continues after the trap. Any other illegal instruction goes to the handler that was installed before.
 *
 * Load this file before the library. It works on x86-64 Linux. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stddef.h>
#include <ucontext.h>

#define MOST 64

struct mask { uint32_t leaf, subleaf, reg, bits; };

static struct mask masks[MOST];
static size_t count;
static unsigned long trapped;
static struct sigaction before;

/* From now on, clear `bits` of a register in the results. Registers 0 to 3 are EAX, EBX, ECX and EDX. Return 0, or -1
 * if the table is full or `reg` is not valid. */
int edgeq_mask_clear(uint32_t leaf, uint32_t subleaf, uint32_t reg, uint32_t bits)
{
    if (count == MOST || reg > 3)
        return -1;
    masks[count++] = (struct mask){leaf, subleaf, reg, bits};
    return 0;
}

/* Return how often the handler has run CPUID. */
unsigned long edgeq_mask_count(void)
{
    return trapped;
}

static void emulate_cpuid(int number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)registers[REG_RIP];
    if (at[0] != 0x0f || at[1] != 0xff) {
        if (before.sa_flags & SA_SIGINFO)
            before.sa_sigaction(number, info, context);
        else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
            before.sa_handler(number);
        else
            sigaction(number, &before, NULL); /* the instruction runs again, and ends the process */
        return;
    }
    uint32_t leaf = (uint32_t)registers[REG_RAX], subleaf = (uint32_t)registers[REG_RCX];
    uint32_t out[4];
    __asm__ volatile("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(subleaf));
    for (size_t i = 0; i < count; i++)
        if (masks[i].leaf == leaf && (leaf != 7 || masks[i].subleaf == subleaf))
            out[masks[i].reg] &= ~masks[i].bits;
    registers[REG_RAX] = out[0];
    registers[REG_RBX] = out[1];
    registers[REG_RCX] = out[2];
    registers[REG_RDX] = out[3];
    registers[REG_RIP] += 2;
    __atomic_add_fetch(&trapped, 1, __ATOMIC_RELAXED);
}

int edgeq_mask_install(void)
{
    struct sigaction action = {0};
    action.sa_sigaction = emulate_cpuid;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGILL, &action, &before);
}
