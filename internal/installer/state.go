package installer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/llmbox-dev/llmbox/internal/cluster"
)

// Where the cluster keeps what llmbox remembers.
const (
	SystemNamespace = "llmbox-system"
	stateName       = "llmbox-state"
	leaseName       = "llmbox-run"
	stateKey        = "state.json"
	recordedKey     = "recorded.yaml"
)

// The lease is renewed three times before anybody may take it over.
const (
	leaseDuration = 15 * time.Second
	renewEvery    = 5 * time.Second
)

// ErrLocked means that another run is at work on this cluster.
var ErrLocked = errors.New("another run is at work on this cluster")

// What the journal says of a component.
const (
	componentReady  = "ready"
	componentFailed = "failed"
	// componentRestored is one whose change failed and was taken back.
	componentRestored = "restored"
)

// ComponentState is what the journal keeps of one component. It is a record for
// people and for status: what is done is always found out by looking.
type ComponentState struct {
	Name     string    `json:"name"`
	Status   string    `json:"status"`
	Version  string    `json:"version,omitempty"`
	Revision int       `json:"revision,omitempty"`
	Error    string    `json:"error,omitempty"`
	Time     time.Time `json:"time"`
}

// Journal is the content of the state ConfigMap.
type Journal struct {
	// Version is llmbox's own at the last run.
	Version    string                    `json:"version"`
	Engine     string                    `json:"engine,omitempty"`
	Outcome    string                    `json:"outcome,omitempty"`
	Started    time.Time                 `json:"started"`
	Ended      *time.Time                `json:"ended,omitempty"`
	Endpoint   string                    `json:"endpoint,omitempty"`
	Model      string                    `json:"model,omitempty"`
	Components map[string]ComponentState `json:"components"`
}

// State keeps the journal in the cluster, so that it is found by whoever runs
// llmbox next and from wherever. It holds no secrets.
type State struct {
	kube kubernetes.Interface
	log  *slog.Logger
	mu   sync.Mutex
	// journal is this run's; recorded are the choices of the run, as YAML.
	journal  Journal
	recorded []byte
}

// LoadState reads the journal and the recorded choices of the last run; both
// are empty on a fresh cluster. A journal that can't be read is reported and
// treated as empty: it decides nothing.
func LoadState(ctx context.Context, kube kubernetes.Interface, log *slog.Logger) (*State, Journal, []byte, error) {
	s := &State{kube: kube, log: log, journal: Journal{Components: map[string]ComponentState{}}}
	cm, err := kube.CoreV1().ConfigMaps(SystemNamespace).Get(ctx, stateName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return s, Journal{}, nil, nil
	}
	if err != nil {
		return nil, Journal{}, nil, fmt.Errorf("reading the state of the last run: %w", cluster.Classify(err))
	}
	var last Journal
	if err := json.Unmarshal([]byte(cm.Data[stateKey]), &last); err != nil {
		log.Warn("the journal of the last run can't be read; going by what the cluster shows", "error", err)
		last = Journal{}
	}
	for name, c := range last.Components {
		s.journal.Components[name] = c
	}
	s.recorded = []byte(cm.Data[recordedKey])
	return s, last, s.recorded, nil
}

// Start notes the beginning of a run and the choices it was made with.
func (s *State) Start(ctx context.Context, j Journal, recorded []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.Components = s.journal.Components
	s.journal, s.recorded = j, recorded
	return s.write(ctx)
}

// Component notes what became of a component. A journal that can't be written
// is logged and not fatal: the next run looks for itself.
func (s *State) Component(ctx context.Context, c ComponentState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.Time = time.Now().UTC()
	s.journal.Components[c.Name] = c
	if err := s.write(context.WithoutCancel(ctx)); err != nil {
		s.log.Warn("writing the journal", "error", err)
	}
}

// Last is what the last run noted of a component.
func (s *State) Last(name string) (ComponentState, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	last, known := s.journal.Components[name]
	return last, known
}

// End notes how the run ended.
func (s *State) End(ctx context.Context, outcome, endpoint string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now().UTC()
	s.journal.Ended, s.journal.Outcome = &now, outcome
	if endpoint != "" {
		s.journal.Endpoint = endpoint
	}
	if err := s.write(context.WithoutCancel(ctx)); err != nil {
		s.log.Warn("writing the journal", "error", err)
	}
}

func (s *State) write(ctx context.Context) error {
	raw, err := json.MarshalIndent(s.journal, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the journal: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	cm := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: stateName, Namespace: SystemNamespace, Labels: ownLabels()},
		Data:       map[string]string{stateKey: string(raw), recordedKey: string(s.recorded)},
	}
	maps := s.kube.CoreV1().ConfigMaps(SystemNamespace)
	_, err = maps.Update(ctx, cm, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = maps.Create(ctx, cm, metav1.CreateOptions{})
	}
	if err != nil {
		return fmt.Errorf("writing the journal: %w", cluster.Classify(err))
	}
	return nil
}

func ownLabels() map[string]string {
	return map[string]string{
		cluster.ManagedByLabel: cluster.ManagedByValue,
		cluster.PartOfLabel:    cluster.ManagedByValue,
	}
}

// Lock takes the run's lease and keeps renewing it until release is called. A
// lease whose holder ran on this machine and is gone is taken over at once;
// any other only after it has expired. lost is closed if somebody else got it.
func Lock(ctx context.Context, kube kubernetes.Interface, log *slog.Logger) (release func(), lost <-chan struct{}, err error) {
	if err := ensureSystemNamespace(ctx, kube); err != nil {
		return nil, nil, err
	}
	me, err := holder()
	if err != nil {
		return nil, nil, err
	}
	leases := kube.CoordinationV1().Leases(SystemNamespace)
	take := func(ctx context.Context) error {
		lease, err := leases.Get(ctx, leaseName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			lease = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: leaseName, Namespace: SystemNamespace, Labels: ownLabels()}}
			hold(lease, me)
			_, err = leases.Create(ctx, lease, metav1.CreateOptions{})
			return err
		}
		if err != nil {
			return err
		}
		if who := held(lease); who != "" && who != me && !holderGone(who) {
			return fmt.Errorf("%w: held by %s", ErrLocked, who)
		}
		hold(lease, me)
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		return err
	}
	// Losing a race to create or update means that somebody else is as quick: look again.
	for tries := 0; ; tries++ {
		err = take(ctx)
		if err == nil || errors.Is(err, ErrLocked) || tries == 5 || !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			break
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("taking the lock: %w", cluster.Classify(err))
	}

	renewing, stop := context.WithCancel(context.WithoutCancel(ctx))
	gone := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(renewEvery)
		defer tick.Stop()
		for {
			select {
			case <-renewing.Done():
				return
			case <-tick.C:
				if err := take(renewing); errors.Is(err, ErrLocked) {
					log.Error("the lock was taken by another run", "error", err)
					close(gone)
					return
				} else if apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
					// The namespace is going, as at the end of an uninstall: nothing left to hold.
					return
				} else if err != nil && renewing.Err() == nil {
					log.Warn("renewing the lock", "error", err)
				}
			}
		}
	}()
	return func() {
		stop()
		<-ended
		giveBack(context.WithoutCancel(ctx), kube, me)
	}, gone, nil
}

func giveBack(ctx context.Context, kube kubernetes.Interface, me string) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	leases := kube.CoordinationV1().Leases(SystemNamespace)
	// The API server can still be at work on the last renewal, which was called off: then
	// the lease is another when it is written than when it was read. Not given back, it
	// expires by itself.
	_ = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		lease, err := leases.Get(ctx, leaseName, metav1.GetOptions{})
		if err != nil || held(lease) != me {
			return err
		}
		lease.Spec.HolderIdentity = nil
		lease.Spec.RenewTime = nil
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		return err
	})
}

func hold(lease *coordinationv1.Lease, me string) {
	now := metav1.NowMicro()
	seconds := int32(leaseDuration / time.Second)
	lease.Spec.HolderIdentity = &me
	lease.Spec.LeaseDurationSeconds = &seconds
	lease.Spec.RenewTime = &now
}

// held returns who holds the lease, or "" when it is free or has expired.
func held(lease *coordinationv1.Lease) string {
	if lease.Spec.HolderIdentity == nil || lease.Spec.RenewTime == nil {
		return ""
	}
	if time.Since(lease.Spec.RenewTime.Time) > leaseDuration {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// holder names this process so that another on the same machine can tell
// whether it still runs: host, boot, process id and its start time in ticks.
func holder() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("reading the host name: %w", err)
	}
	start, err := processStart(os.Getpid())
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s/%s/%d/%s", host, bootID(), os.Getpid(), start), nil
}

func holderGone(who string) bool {
	parts := strings.Split(who, "/")
	host, err := os.Hostname()
	if err != nil || len(parts) != 4 || parts[0] != host {
		return false
	}
	if parts[1] != bootID() {
		return true
	}
	pid, err := strconv.Atoi(parts[2])
	if err != nil {
		return false
	}
	start, err := processStart(pid)
	if errors.Is(err, os.ErrNotExist) {
		return true
	}
	return err == nil && start != parts[3]
}

func bootID() string {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(raw))
}

// processStart reads field 22 of /proc/PID/stat; the command name before it
// may hold spaces and ends at the last parenthesis.
func processStart(pid int) (string, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", fmt.Errorf("reading the start time of process %d: %w", pid, err)
	}
	text := string(raw)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return "", fmt.Errorf("reading the start time of process %d: unexpected format", pid)
	}
	return fields[19], nil
}

func ensureSystemNamespace(ctx context.Context, kube kubernetes.Interface) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: SystemNamespace, Labels: ownLabels()}}
	_, err := kube.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating namespace %s: %w", SystemNamespace, cluster.Classify(err))
	}
	return nil
}
