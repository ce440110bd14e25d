package node

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/llmbox-dev/llmbox/test/lab/images"
	"github.com/llmbox-dev/llmbox/test/lab/k3sserver"
	"github.com/llmbox-dev/llmbox/test/lab/labdir"
	"github.com/llmbox-dev/llmbox/test/lab/process"
)

// A lab of machine size has two kinds of first processes, each of namespaces of its own.
// The outer one is what is around machines: a network, the registry, the model hub, the
// switch. Inside its process namespace each machine has one of its own, whose first
// process does what an init does on a machine without one: it runs the boot entries and
// buries orphans. To end that process is to cut the power: the kernel ends everything
// else on the machine, and what only a running machine has (mounts, links, rules, /run)
// goes with it. Its directory stays, and another boot begins on it.

const (
	// aroundAddress is what machines have as gateway, name server, registry and hub.
	aroundAddress   = "10.99.0.254"
	machinesSubnet  = "10.99.0.0/24"
	machineInsides  = "machine-inside"
	machineCgroup   = "init"
	controlSocket   = "control.sock"
	machinesFile    = "machines.json"
	longestSocket   = 107
	machineBootWait = time.Minute
)

// MachineCommand is the hidden command that must call Machine.
func MachineCommand() string { return machineInsides }

// MachineState is what is known of one machine.
type MachineState struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	// Root is the machine's root directory as seen from outside: what is on its disk.
	Root string `json:"root"`
	// Boots counts from 1; On says whether it runs.
	Boots int  `json:"boots"`
	On    bool `json:"on"`
	// Init is the machine's first process as seen from outside.
	Init labdir.Process `json:"init"`
}

// needed are what a machine's lab runs beside the programs of a server.
func machineNeeded() []string {
	return append(k3sserver.Needed(), "coredns", "local-path-provisioner", "pause-standin", "k3s-standin")
}

// machineConfig is what a machine's first process is told.
type machineConfig struct {
	config
	State MachineState
	// HostProc is /proc of the machine outside, for a moment.
	HostProc string
}

func (m machineConfig) dir() string { return filepath.Join(m.Dir, "machines", m.State.Name) }

func (m machineConfig) cgroup() string { return m.Cgroup + "/" + m.State.Name }

// around is what is around the machines.
type around struct {
	config
	group *process.Group

	mu       sync.Mutex
	machines []MachineState
	running  map[string]*process.Child
}

func (c config) runMachines(ctx, starting context.Context, ready func(Ready) error) (up bool, err error) {
	for _, fd := range []int{apiDescriptor, gatewayDescriptor, answerDescriptor} {
		unix.CloseOnExec(fd)
	}
	unix.Umask(0o022)
	hostProc := filepath.Join(c.Dir, ".proc")
	if err := c.separate(hostProc); err != nil {
		return false, err
	}
	if err := weigh(c.Cgroup, 64*c.Machines); err != nil {
		return false, err
	}
	if err := aroundNetwork(starting); err != nil {
		return false, err
	}
	a := &around{config: c, group: process.NewGroup(), running: map[string]*process.Child{}}
	parts, failed := c.newParts(ctx)

	all, err := images.Catalogue(c.Programs, c.LLMBox, c.LLMBoxVersion)
	if err != nil {
		return false, err
	}
	there, lacking := images.Available(all)
	registry, err := images.NewRegistry(filepath.Join(c.Dir, "registry"), there)
	if err != nil {
		return false, err
	}
	l, err := net.Listen("tcp4", net.JoinHostPort(aroundAddress, registryPort))
	if err != nil {
		return false, fmt.Errorf("serving images: %w", err)
	}
	parts.run("the registry", func(ctx context.Context) error { return registry.Serve(ctx, l) })
	names, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(aroundAddress), Port: 53})
	if err != nil {
		return false, fmt.Errorf("serving names: %w", err)
	}
	parts.run("the name server", func(ctx context.Context) error { return denyNames(ctx, names) })
	if c.Model != "" {
		if _, err := a.group.Start(process.Spec{
			Name: "hub-standin", Path: filepath.Join(c.Programs, "hub-standin"), Dir: c.Dir, Log: filepath.Join(c.Dir, "logs", "hub-standin.log"),
			Args: []string{"--listen", net.JoinHostPort(aroundAddress, hubPort), "--model", c.Model},
		}); err != nil {
			return false, err
		}
	}
	for i := range c.Machines {
		a.machines = append(a.machines, MachineState{
			Name: fmt.Sprintf("gpu-%d", i), Address: fmt.Sprintf("10.99.0.%d", i+1),
			Root: filepath.Join(c.Dir, "machines", fmt.Sprintf("gpu-%d", i), "root"),
		})
	}
	for _, m := range a.machines {
		if err := a.boot(starting, m.Name, ""); err != nil {
			return false, err
		}
	}
	control, err := a.listen()
	if err != nil {
		return false, err
	}
	parts.run("the switch", func(ctx context.Context) error { return a.serve(ctx, control) })
	parts.run("the API server's port", func(ctx context.Context) error {
		return forwardTo(ctx, os.NewFile(apiDescriptor, "api"), func() string { return a.addressOf(0) + ":6443" })
	})
	parts.run("the gateway's port", func(ctx context.Context) error {
		return forwardTo(ctx, os.NewFile(gatewayDescriptor, "gateway"), func() string {
			return fmt.Sprintf("%s:%d", a.addressOf(0), c.NodeGatewayPort)
		})
	})
	r := Ready{Hub: "http://" + net.JoinHostPort(aroundAddress, hubPort), Machines: a.states()}
	for _, s := range registry.Served() {
		if s.StandIn {
			r.StandIns = append(r.StandIns, s.Reference+" = "+s.Program)
		}
	}
	for ref, why := range lacking {
		r.Lacking = append(r.Lacking, ref+": "+strings.Join(why, ", "))
	}
	slices.Sort(r.Lacking)
	if err := ready(r); err != nil {
		return false, err
	}
	select {
	case <-ctx.Done():
		return true, nil
	case err := <-failed:
		return true, err
	case child := <-a.group.Died():
		return true, child.DiedError()
	}
}

// separate keeps mounts to these namespaces, and makes /proc that of their processes.
// The one outside stays to be seen at another place.
func (c config) separate(hostProc string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("separating mounts: %w", err)
	}
	if err := os.MkdirAll(hostProc, 0o700); err != nil {
		return fmt.Errorf("making the lab directory: %w", err)
	}
	if err := bind("/proc", hostProc, false); err != nil {
		return err
	}
	return mount("proc", "/proc", "proc")
}

// aroundNetwork makes the network that machines are plugged into. What is not on it is
// unreachable at once, so that a program that wants the world fails instead of waiting.
func aroundNetwork(ctx context.Context) error {
	for _, line := range []string{
		"link set lo up",
		"link add lan type bridge",
		"address add " + aroundAddress + "/24 dev lan",
		"link set lan up",
		"route add unreachable default",
	} {
		if err := ip(ctx, line); err != nil {
			return err
		}
	}
	// It answers for the rest of the world, with "unreachable".
	return kernel(map[string]string{"/proc/sys/net/ipv4/ip_forward": "1"})
}

// denyNames answers every question for a name with "there is none": nobody waits for a
// name server that is not there.
func denyNames(ctx context.Context, conn *net.UDPConn) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	buffer := make([]byte, 4096)
	for {
		n, from, err := conn.ReadFromUDP(buffer)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("reading a question: %w", err)
		}
		const header, isAnswer, canRecurse, noSuchName = 12, 0x80, 0x80, 3
		if n < header {
			continue
		}
		buffer[2] |= isAnswer
		buffer[3] = canRecurse | noSuchName
		// Who asked and is gone has no use for the answer.
		_, _ = conn.WriteToUDP(buffer[:n], from)
	}
}

// ip runs one line of ip(8).
func ip(ctx context.Context, line string) error {
	out, err := exec.CommandContext(ctx, "ip", strings.Fields(line)...).CombinedOutput() // #nosec G204 -- lines of this package
	if err != nil {
		return fmt.Errorf("making the network (ip %s): %w: %s", line, err, strings.TrimSpace(string(out)))
	}
	return nil
}

func (a *around) states() []MachineState {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.machines)
}

func (a *around) addressOf(i int) string { return a.states()[i].Address }

func (a *around) find(name string) (MachineState, error) {
	for _, m := range a.states() {
		if m.Name == name || name == "" {
			return m, nil
		}
	}
	return MachineState{}, fmt.Errorf("there is no machine %q", name)
}

func (a *around) keep(m MachineState) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.machines {
		if a.machines[i].Name == m.Name {
			a.machines[i] = m
		}
	}
	raw, err := json.Marshal(a.machines)
	if err != nil {
		return fmt.Errorf("noting the machines: %w", err)
	}
	return labdir.WriteFile(filepath.Join(a.Dir, machinesFile), raw)
}

// cut ends a machine at once.
func (a *around) cut(ctx context.Context, name string) error {
	m, err := a.find(name)
	if err != nil {
		return err
	}
	child := a.running[m.Name]
	if child == nil {
		return nil
	}
	delete(a.running, m.Name)
	if err := a.group.Kill(child); err != nil {
		return err
	}
	m.On, m.Init = false, labdir.Process{}
	// The kernel takes the link away a moment after the last process; a boot that came
	// first would find the name taken.
	_ = ip(ctx, "link delete "+m.Name)
	return errors.Join(removeCgroups(a.Cgroup+"/"+m.Name), a.keep(m))
}

// boot starts a machine, at another address if one is named.
func (a *around) boot(ctx context.Context, name, address string) error {
	m, err := a.find(name)
	if err != nil {
		return err
	}
	if a.running[m.Name] != nil {
		return fmt.Errorf("machine %s runs already", m.Name)
	}
	if address != "" {
		parsed := net.ParseIP(address)
		if _, subnet, err := net.ParseCIDR(machinesSubnet); err != nil || !subnet.Contains(parsed) {
			return fmt.Errorf("address %s is not in %s", address, machinesSubnet)
		}
		m.Address = address
	}
	m.Boots++
	mc := machineConfig{config: a.config, State: m, HostProc: filepath.Join(a.Dir, ".proc")}
	raw, err := json.Marshal(mc)
	if err != nil {
		return fmt.Errorf("encoding a machine's options: %w", err)
	}
	if err := os.MkdirAll(mc.dir(), 0o755); err != nil { // #nosec G301 -- its users are not all root
		return fmt.Errorf("making a machine: %w", err)
	}
	path := filepath.Join(mc.dir(), "machine.json")
	if err := labdir.WriteFile(path, raw); err != nil {
		return err
	}
	if err := makeCgroups(mc.cgroup()); err != nil {
		return err
	}
	plugged, plug, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("starting a machine: %w", err)
	}
	answers, answering, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("starting a machine: %w", errors.Join(err, plugged.Close(), plug.Close()))
	}
	defer func() { _ = errors.Join(plug.Close(), answers.Close()) }()
	child, err := a.group.Start(process.Spec{
		Name: m.Name, Path: "/proc/self/exe", Args: []string{machineInsides, path}, Dir: "/", Log: filepath.Join(a.Dir, "logs", m.Name+".log"),
		Env:   []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Files: []*os.File{plugged, answering},
		Namespaces: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
	})
	if err = errors.Join(err, plugged.Close(), answering.Close()); err != nil {
		return err
	}
	fail := func(err error) error { return errors.Join(err, a.group.Kill(child)) }
	for _, line := range []string{
		"link add " + m.Name + " type veth peer name uplink netns " + fmt.Sprint(child.PID),
		"link set " + m.Name + " master lan up",
	} {
		if err := ip(ctx, line); err != nil {
			return fail(err)
		}
	}
	if _, err := plug.Write([]byte{1}); err != nil {
		return fail(fmt.Errorf("plugging a machine in: %w", err))
	}
	if err := answers.SetReadDeadline(time.Now().Add(machineBootWait)); err != nil {
		return fail(fmt.Errorf("waiting for a machine: %w", err))
	}
	line, err := bufio.NewReader(answers).ReadBytes('\n')
	var said machineAnswer
	if err == nil {
		err = json.Unmarshal(line, &said)
	}
	if err == nil && said.Error != "" {
		err = errors.New(said.Error)
	}
	if err != nil {
		return fail(fmt.Errorf("booting %s: %w\n%s", m.Name, err, process.Tail(filepath.Join(a.Dir, "logs", m.Name+".log"), 10)))
	}
	m.On, m.Init = true, said.Init
	a.running[m.Name] = child
	return a.keep(m)
}

// machineAnswer is what a machine's first process says once.
type machineAnswer struct {
	Init  labdir.Process `json:"init"`
	Error string         `json:"error,omitempty"`
}

// order is what the switch is told, and answer what it says.
type order struct {
	Machine string `json:"machine"`
	// Cut ends it, Boot starts it, at Address if that is set.
	Cut     bool   `json:"cut"`
	Boot    bool   `json:"boot"`
	Address string `json:"address"`
}

type orderAnswer struct {
	Error   string       `json:"error,omitempty"`
	Machine MachineState `json:"machine"`
}

func (a *around) listen() (net.Listener, error) {
	path := filepath.Join(a.Dir, controlSocket)
	if len(path) > longestSocket {
		return nil, fmt.Errorf("choosing the lab directory: %s is %d bytes long, a Unix socket's path has at most %d: choose a shorter --dir", path, len(path), longestSocket)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("making the switch: %w", err)
	}
	return l, nil
}

// serve follows orders one after the other.
func (a *around) serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("waiting for orders: %w", err)
		}
		a.follow(ctx, conn)
	}
}

func (a *around) follow(ctx context.Context, conn net.Conn) {
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, 2*machineBootWait)
	defer cancel()
	// Who connects and says nothing must not keep others waiting.
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	var o order
	err := json.NewDecoder(conn).Decode(&o)
	if err == nil && o.Cut {
		err = a.cut(ctx, o.Machine)
	}
	if err == nil && o.Boot {
		err = a.boot(ctx, o.Machine, o.Address)
	}
	answer := orderAnswer{}
	if err != nil {
		answer.Error = err.Error()
	}
	answer.Machine, _ = a.find(o.Machine)
	_ = json.NewEncoder(conn).Encode(answer)
}

// Order tells a lab's switch to cut a machine's power, to boot it, or both.
func Order(ctx context.Context, dir, machine string, cut, boot bool, address string) (MachineState, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, controlSocket))
	if err != nil {
		return MachineState{}, fmt.Errorf("reaching the lab's switch: %w", err)
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if err := json.NewEncoder(conn).Encode(order{Machine: machine, Cut: cut, Boot: boot, Address: address}); err != nil {
		return MachineState{}, fmt.Errorf("telling the lab's switch: %w", err)
	}
	var answer orderAnswer
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return MachineState{}, fmt.Errorf("listening to the lab's switch: %w", err)
	}
	if answer.Error != "" {
		return answer.Machine, errors.New(answer.Error)
	}
	return answer.Machine, nil
}

// ErrOff means that a machine does not run.
var ErrOff = errors.New("the machine is off")

// ErrNoMachine means that a lab has no machine of that name.
var ErrNoMachine = errors.New("there is no such machine in this lab")

// ReadMachine returns what is known of a machine of a lab; with no name, the first.
func ReadMachine(dir, name string) (MachineState, error) {
	raw, err := os.ReadFile(filepath.Join(dir, machinesFile)) // #nosec G304 -- the caller names its own lab
	if err != nil {
		return MachineState{}, fmt.Errorf("reading the lab's machines: %w", err)
	}
	var all []MachineState
	if err := json.Unmarshal(raw, &all); err != nil {
		return MachineState{}, fmt.Errorf("reading the lab's machines: %w", err)
	}
	for _, m := range all {
		if m.Name == name || name == "" {
			return m, nil
		}
	}
	return MachineState{}, fmt.Errorf("%s: %w", name, ErrNoMachine)
}

// HasMachines tells whether a directory is a lab of machines.
func HasMachines(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, machinesFile))
	return err == nil
}

// Join puts this process into the cgroups of a machine that runs, as if it had been
// started there, and returns the machine's first process, whose namespaces are to be
// entered.
func Join(dir, name string) (MachineState, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return MachineState{}, fmt.Errorf("resolving the lab directory: %w", err)
	}
	m, err := ReadMachine(dir, name)
	if err != nil {
		return m, err
	}
	if !m.On || !m.Init.Alive() {
		return m, fmt.Errorf("%s: %w", m.Name, ErrOff)
	}
	return m, enterCgroups(cgroupName(dir) + "/" + m.Name + "/" + machineCgroup)
}
