// Package k3s gets, verifies, configures, starts, waits for and removes k3s on one
// host. It knows k3s as its documentation describes it: the binary of a release, the
// files under /etc/rancher/k3s and the data directory, the service that runs it.
//
// What decides is pure: which source a binary comes from, what stands in each file,
// why a restart is due, what a line of the log means, what belongs to this k3s and
// what to somebody else. What acts is thin, works below a root directory and through
// an injected runner of programs, and can be cut off at any point and run again.
//
// It must not know components, charts, models, the order of an install, or how
// anything is shown. It asks the API only whether the node, its DNS and its storage
// are there.
package k3s

import (
	"errors"
	"path"
)

// The places that k3s itself gives a meaning (docs.k3s.io, "Configuration Options"
// and "Private Registry Configuration").
const (
	// ConfigDir holds what k3s reads when it starts.
	ConfigDir  = "/etc/rancher/k3s"
	ConfigFile = ConfigDir + "/config.yaml"
	// DropInDir holds further files that k3s reads after ConfigFile, in the order of
	// their names.
	DropInDir      = ConfigDir + "/config.yaml.d"
	RegistriesFile = ConfigDir + "/registries.yaml"
	// KubeletFile is handed to k3s by kubelet-arg; k3s copies it behind its own defaults.
	KubeletFile = ConfigDir + "/kubelet.yaml"
	// NodeIPFile is a drop-in that the hook writes before each start.
	NodeIPFile = DropInDir + "/50-llmbox-node-ip.yaml"
	// Kubeconfig is where k3s writes the administrator's.
	Kubeconfig = ConfigDir + "/k3s.yaml"
	// DefaultDataDir is k3s's own.
	DefaultDataDir = "/var/lib/rancher/k3s"

	runDir     = "/run/k3s"
	kubeletDir = "/var/lib/kubelet"
)

// The places that llmbox chooses.
const (
	// RecordName is the file of the record within llmbox's data directory.
	RecordName = "k3s.json"
	// logName is the log of k3s where no journal takes it.
	logName = "k3s.log"
	// supervisorDir is gone after a reboot, like the process that it speaks of.
	supervisorDir = "/run/llmbox"
)

// ImagesDir is where k3s looks for archives of images to import when it starts.
func ImagesDir(dataDir string) string { return path.Join(dataDir, "agent/images") }

// ManifestsDir is where k3s looks for manifests to apply.
func ManifestsDir(dataDir string) string { return path.Join(dataDir, "server/manifests") }

// TokenFile holds the token by which others join.
func TokenFile(dataDir string) string { return path.Join(dataDir, "server/token") }

// Role is what k3s does on a host.
type Role string

// The roles.
const (
	Server Role = "server"
	Agent  Role = "agent"
)

// Errors that callers tell apart.
var (
	// ErrForeign means that something is in the way that llmbox did not write.
	ErrForeign = errors.New("not written by llmbox")
	// ErrChecksum means that a file is not the one that was published.
	ErrChecksum = errors.New("checksum does not match")
	// ErrNoChecksum means that nothing says what the file should be.
	ErrNoChecksum = errors.New("no checksum to compare with")
	// ErrNotK3s means that a program does not answer as k3s does.
	ErrNotK3s = errors.New("not a k3s binary")
	// ErrNoSource means that there is no k3s to be had.
	ErrNoSource = errors.New("no k3s binary to be had")
	// ErrVersion means that two versions don't go together.
	ErrVersion = errors.New("version not possible here")
	// ErrLeft means that something of k3s could not be removed.
	ErrLeft = errors.New("could not be removed")
	// ErrMounted means that something is still mounted where files were to be removed.
	ErrMounted = errors.New("still mounted")
	// ErrSetting means that a setting can't be written for k3s.
	ErrSetting = errors.New("setting not possible")
	// ErrNoAddress means that the machine has no address that a node could have.
	ErrNoAddress = errors.New("no address for the node")
	// ErrRuntime means that pods with the GPU runtime can't start.
	ErrRuntime = errors.New("no GPU runtime")
	// ErrSupervised means that another supervisor is at work.
	ErrSupervised = errors.New("a supervisor runs already")
)

// Problem is an error with the way out of it.
type Problem struct {
	// What is one sentence without secrets.
	What string
	// Out is what a person types.
	Out string
	Err error
}

// Error implements error.
func (p *Problem) Error() string { return p.What }

// Unwrap gives the error behind it.
func (p *Problem) Unwrap() error { return p.Err }

// Fix is what a person types.
func (p *Problem) Fix() string { return p.Out }

// Phase is a part of the work, for progress.
type Phase string

// The phases, in the order in which they come.
const (
	PhaseBinary  Phase = "binary"
	PhaseConfig  Phase = "config"
	PhaseService Phase = "service"
	PhaseReady   Phase = "ready"
	PhaseRuntime Phase = "runtime"
	PhaseRemove  Phase = "remove"
)

// Progress is a word on how the work goes.
type Progress struct {
	Phase   Phase
	Message string
	// Done and Total count Unit; Total 0 means unknown.
	Done, Total int64
	Unit        string
}

// Report takes progress; nil takes none.
type Report func(Progress)

func (r Report) say(phase Phase, message string) {
	if r != nil {
		r(Progress{Phase: phase, Message: message})
	}
}
