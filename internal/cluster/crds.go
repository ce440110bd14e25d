package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/yaml"
)

func crdResource() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
}

// LoadCRDs reads crds/NAME/*.yaml of each named folder.
func LoadCRDs(fsys fs.FS, names []string) ([]*unstructured.Unstructured, error) {
	var out []*unstructured.Unstructured
	for _, name := range names {
		dir := path.Join("crds", name)
		entries, err := fs.ReadDir(fsys, dir)
		if err != nil {
			return nil, fmt.Errorf("reading the CRDs of %s: %w", name, err)
		}
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".yaml") {
				continue
			}
			raw, err := fs.ReadFile(fsys, path.Join(dir, e.Name()))
			if err != nil {
				return nil, fmt.Errorf("reading CRD %s: %w", e.Name(), err)
			}
			obj := &unstructured.Unstructured{}
			if err := yaml.Unmarshal(raw, &obj.Object); err != nil {
				return nil, fmt.Errorf("decoding CRD %s: %w", e.Name(), err)
			}
			out = append(out, obj)
		}
	}
	return out, nil
}

// CRDResult says what became of each CRD.
type CRDResult struct {
	// Applied are new or changed, Unchanged were as wanted, Foreign belong to
	// somebody else and were left alone.
	Applied, Unchanged, Foreign []string
}

// errCRDRefused is what a CRD's own condition says when it can never serve.
var errCRDRefused = errors.New("the API server refuses the CRD")

// errFeedStopped is what a CRD that was not sent any more ends with.
var errFeedStopped = errors.New("stopped before it was applied")

// crdsAtATime bounds how many CRDs the API server works on for us together. Each
// costs it about a third of a CPU second; more at a time only delay the first.
const crdsAtATime = 4

// CRDFeed brings CRDs in, in the order given, and lets everyone who needs some of
// them wait for just those. A CRD that somebody else made is neither overwritten
// nor owned.
type CRDFeed struct {
	client *Client
	crds   []*unstructured.Unstructured
	mu     sync.Mutex
	places map[string]*crdPlace
	holds  int
	free   *sync.Cond
	stop   chan struct{}
	once   sync.Once
	ended  chan struct{}
}

// crdPlace is one CRD on its way. Its fields but done are guarded by the feed.
type crdPlace struct {
	done        chan struct{}
	finished    bool
	sent        bool
	established bool
	refused     error
	outcome     crdOutcome
	err         error
}

type crdOutcome int

const (
	crdApplied crdOutcome = iota
	crdUnchanged
	crdForeign
)

// FeedCRDs starts to bring the CRDs in. It goes on until all are established, ctx
// ends or Stop is called.
func (c *Client) FeedCRDs(ctx context.Context, crds []*unstructured.Unstructured) *CRDFeed {
	feed := &CRDFeed{
		client: c, crds: crds, places: make(map[string]*crdPlace, len(crds)),
		stop: make(chan struct{}), ended: make(chan struct{}),
	}
	feed.free = sync.NewCond(&feed.mu)
	for _, crd := range crds {
		feed.places[crd.GetName()] = &crdPlace{done: make(chan struct{})}
	}
	go func() {
		defer close(feed.ended)
		// Whatever ends the feed, nobody is left waiting.
		feed.settleAll(feed.run(ctx))
	}()
	return feed
}

// Stop lets those that are under way finish, sends no other and returns when
// nothing is sent any more.
func (f *CRDFeed) Stop() {
	f.once.Do(func() {
		close(f.stop)
		f.free.Broadcast()
	})
	<-f.ended
}

// longestHold ends a hold by itself. A release sends what it is made of within a
// second; after that it mostly sits in the API server, which lets the first objects
// of a new kind wait for two seconds on purpose (apiextensions-apiserver
// customresource_handler.go, "justCreated").
const longestHold = time.Second

// Hold keeps the feed from sending further CRDs until the returned function is
// called or a second has gone by: what has its CRDs should not queue behind those of
// others.
func (f *CRDFeed) Hold() (release func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holds++
	letGo := sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.holds--
		f.free.Broadcast()
	})
	timer := time.AfterFunc(longestHold, letGo)
	return func() {
		timer.Stop()
		letGo()
	}
}

// awaitTurn waits while somebody holds the feed and says whether to go on.
func (f *CRDFeed) awaitTurn(ctx context.Context) bool {
	defer context.AfterFunc(ctx, f.free.Broadcast)()
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.holds > 0 && !isClosed(f.stop) && ctx.Err() == nil {
		f.free.Wait()
	}
	return !isClosed(f.stop) && ctx.Err() == nil
}

// run returns why the CRDs that are not settled when it returns never will be.
func (f *CRDFeed) run(ctx context.Context) error {
	if len(f.crds) == 0 {
		return nil
	}
	have, err := f.client.Dynamic.Resource(crdResource()).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return fmt.Errorf("listing CRDs: %w", Classify(err))
	}
	present := make(map[string]*unstructured.Unstructured, len(have.Items))
	for i := range have.Items {
		present[have.Items[i].GetName()] = &have.Items[i]
	}
	var send []*unstructured.Unstructured
	for _, crd := range f.crds {
		name := crd.GetName()
		want, digest, err := prepare(crd)
		if err != nil {
			f.settle(name, crdApplied, err)
			continue
		}
		there := present[name]
		switch {
		case there == nil || there.GetDeletionTimestamp() != nil:
			send = append(send, want)
		case there.GetLabels()[ManagedByLabel] != ManagedByValue:
			f.settle(name, crdForeign, nil)
		case there.GetAnnotations()[digestAnnotation] != digest || !established(there):
			send = append(send, want)
		default:
			f.settle(name, crdUnchanged, nil)
		}
	}
	if len(send) == 0 {
		return nil
	}

	watching, endWatch := context.WithCancel(ctx)
	defer endWatch()
	watched := make(chan error, 1)
	go func() { watched <- f.watch(watching) }()

	sending := errgroup.Group{}
	sending.SetLimit(crdsAtATime)
	stopped := false
	for _, crd := range send {
		if stopped = stopped || !f.awaitTurn(ctx); stopped {
			f.settle(crd.GetName(), crdApplied, fmt.Errorf("%s: %w", describe(crd), errFeedStopped))
			continue
		}
		sending.Go(func() error {
			if err := f.client.applyCRD(ctx, crd); err != nil {
				f.settle(crd.GetName(), crdApplied, err)
				return nil
			}
			f.markSent(crd.GetName())
			return nil
		})
	}
	_ = sending.Wait()
	all := make(chan struct{})
	go func() {
		defer close(all)
		for _, place := range f.places {
			select {
			case <-place.done:
			case <-watching.Done():
				return
			}
		}
	}()
	select {
	case <-all:
		return nil
	case err := <-watched:
		return err
	case <-f.stop:
		return errFeedStopped
	case <-ctx.Done():
		return fmt.Errorf("waiting for CRDs to be established: %w", context.Cause(ctx))
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// watch follows the CRDs of ours until ctx ends. It lists once a watch: these
// objects are the largest a cluster holds.
func (f *CRDFeed) watch(ctx context.Context) error {
	res := f.client.Dynamic.Resource(crdResource())
	ours := metav1.ListOptions{LabelSelector: ManagedByLabel + "=" + ManagedByValue}
	for {
		list, err := res.List(ctx, ours)
		if err != nil {
			return fmt.Errorf("listing CRDs: %w", Classify(err))
		}
		for i := range list.Items {
			f.see(&list.Items[i])
		}
		following := ours
		following.ResourceVersion = list.GetResourceVersion()
		changes, err := res.Watch(ctx, following)
		if err != nil {
			return fmt.Errorf("watching CRDs: %w", Classify(err))
		}
		err = follow(ctx, changes, func(crd *unstructured.Unstructured) (bool, error) {
			f.see(crd)
			return false, nil
		})
		changes.Stop()
		if err != nil {
			return fmt.Errorf("waiting for CRDs to be established: %w", err)
		}
	}
}

// see takes in how a CRD stands. One that was not sent yet may be the old one on
// its way out, so that being established counts only from then on.
func (f *CRDFeed) see(crd *unstructured.Unstructured) {
	f.mu.Lock()
	defer f.mu.Unlock()
	place, known := f.places[crd.GetName()]
	if !known {
		return
	}
	place.established = established(crd) && crd.GetDeletionTimestamp() == nil
	place.refused = nil
	if msg, refused := condition(crd, "NamesAccepted", "False"); refused {
		place.refused = fmt.Errorf("%w: %s: %s", errCRDRefused, crd.GetName(), msg)
	}
	f.judge(place)
}

func (f *CRDFeed) markSent(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	place := f.places[name]
	place.sent = true
	f.judge(place)
}

// judge is called with the lock held.
func (f *CRDFeed) judge(place *crdPlace) {
	switch {
	case !place.sent:
	case place.refused != nil:
		f.finish(place, crdApplied, place.refused)
	case place.established:
		f.finish(place, crdApplied, nil)
	}
}

func (f *CRDFeed) settle(name string, outcome crdOutcome, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.finish(f.places[name], outcome, err)
}

func (f *CRDFeed) settleAll(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		err = errFeedStopped
	}
	for _, place := range f.places {
		f.finish(place, crdApplied, err)
	}
}

// finish is called with the lock held; the first word counts.
func (f *CRDFeed) finish(place *crdPlace, outcome crdOutcome, err error) {
	if place.finished {
		return
	}
	place.finished, place.outcome, place.err = true, outcome, err
	close(place.done)
}

// Await waits until the named CRDs are established and the API server answers for
// those of them that objects use. progress is called with the number done.
func (f *CRDFeed) Await(ctx context.Context, names []string, objects []*unstructured.Unstructured, progress func(done, total int)) (CRDResult, error) {
	var result CRDResult
	wanted := make(map[string]bool, len(names))
	for i, name := range names {
		wanted[name] = true
		place, known := f.places[name]
		if !known {
			return result, fmt.Errorf("waiting for CRD %s: nobody applies it", name)
		}
		select {
		case <-place.done:
		case <-ctx.Done():
			return result, fmt.Errorf("waiting for CRD %s: %w", name, context.Cause(ctx))
		}
		if errors.Is(place.err, errFeedStopped) && ctx.Err() != nil {
			return result, fmt.Errorf("waiting for CRD %s: %w", name, context.Cause(ctx))
		}
		if place.err != nil {
			return result, place.err
		}
		switch place.outcome {
		case crdForeign:
			result.Foreign = append(result.Foreign, name)
		case crdUnchanged:
			result.Unchanged = append(result.Unchanged, name)
		default:
			result.Applied = append(result.Applied, name)
		}
		progress(i+1, len(names))
	}
	if len(result.Applied) == 0 {
		return result, nil
	}
	f.client.Mapper.Reset()
	var mine []*unstructured.Unstructured
	for _, crd := range f.crds {
		if wanted[crd.GetName()] {
			mine = append(mine, crd)
		}
	}
	return result, f.client.awaitServed(ctx, mine, objects)
}

// applyCRD sends a CRD and asks for its metadata only in return: the largest have
// half a megabyte. It waits out one of the same name that is still being deleted:
// what was applied to that would go with it.
func (c *Client) applyCRD(ctx context.Context, crd *unstructured.Unstructured) error {
	raw, err := json.Marshal(crd)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", describe(crd), err)
	}
	force := true
	res := c.Metadata.Resource(crdResource())
	for {
		there, err := res.Get(ctx, crd.GetName(), metav1.GetOptions{ResourceVersion: "0"})
		if apierrors.IsNotFound(err) || (err == nil && there.GetDeletionTimestamp() == nil) {
			_, err := res.Patch(ctx, crd.GetName(), types.ApplyPatchType, raw,
				metav1.PatchOptions{FieldManager: FieldManager, Force: &force})
			if err != nil {
				return fmt.Errorf("applying %s: %w", describe(crd), Classify(err))
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading %s: %w", describe(crd), Classify(err))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for the old %s to be deleted: %w", describe(crd), ctx.Err())
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// follow hands each changed object to see until that is satisfied, the watch
// ends (nil: list again) or ctx does.
func follow(ctx context.Context, changes watch.Interface, see func(*unstructured.Unstructured) (bool, error)) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, open := <-changes.ResultChan():
			if !open || e.Type == watch.Error {
				return nil
			}
			obj, ok := e.Object.(*unstructured.Unstructured)
			if !ok || e.Type == watch.Deleted {
				continue
			}
			if done, err := see(obj); done || err != nil {
				return err
			}
		}
	}
}

// ApplyCRDs brings all the CRDs in and waits until each is established.
func (c *Client) ApplyCRDs(ctx context.Context, crds []*unstructured.Unstructured, progress func(done, total int)) (CRDResult, error) {
	feed := c.FeedCRDs(ctx, crds)
	defer feed.Stop()
	names := make([]string, len(crds))
	for i, crd := range crds {
		names[i] = crd.GetName()
	}
	return feed.Await(ctx, names, nil, progress)
}

// awaitServed waits until the API server answers for each kind of the objects
// that one of the CRDs defines: between a CRD being established and its handler
// being in place, a busy server still says "not found".
func (c *Client) awaitServed(ctx context.Context, crds, objects []*unstructured.Unstructured) error {
	resources := map[schema.GroupKind]schema.GroupVersionResource{}
	for _, crd := range crds {
		if gvr, _, ok := storedResource(crd); ok {
			kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
			resources[schema.GroupKind{Group: gvr.Group, Kind: kind}] = gvr
		}
	}
	wanted := map[schema.GroupVersionResource]bool{}
	for _, obj := range objects {
		gvk := obj.GroupVersionKind()
		if gvr, ok := resources[gvk.GroupKind()]; ok {
			gvr.Version = gvk.Version
			wanted[gvr] = true
		}
	}
	group, asking := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for gvr := range wanted {
		group.Go(func() error {
			for {
				_, err := c.Dynamic.Resource(gvr).List(asking, metav1.ListOptions{Limit: 1})
				if err == nil {
					return nil
				}
				if !apierrors.IsNotFound(err) {
					return fmt.Errorf("asking for %s: %w", gvr.GroupResource(), Classify(err))
				}
				select {
				case <-asking.Done():
					return fmt.Errorf("waiting for %s to be served: %w", gvr.GroupResource(), asking.Err())
				case <-time.After(50 * time.Millisecond):
				}
			}
		})
	}
	return group.Wait()
}

func established(crd *unstructured.Unstructured) bool {
	_, ok := condition(crd, "Established", "True")
	return ok
}
