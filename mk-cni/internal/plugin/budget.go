package plugin

import "time"

// How long each verb may take from the moment its input is complete. A caller
// must hear from us before it gives up by itself: a killed ADD is a leak until GC.
const (
	// AddBudget is mk-cni's whole ADD. mknetd's own limit for a create with its
	// rollback must stay below createBudget.
	AddBudget      = settleBudget + createBudget + rollbackBudget + slack // 20 s
	settleBudget   = 2 * time.Second                                      // an older deferred DEL of the same attachment
	createBudget   = 13 * time.Second
	rollbackBudget = 4 * time.Second

	// DelBudget holds also with mknetd hung: the call, then the queue's write.
	DelBudget     = delCallBudget + queueBudget // 2 s
	delCallBudget = 1500 * time.Millisecond
	queueBudget   = 500 * time.Millisecond // two fsyncs; not enforceable, only allowed for

	// With an IPAM plugin ADD may take its time and that of its DEL longer, each
	// other verb that of one call. A DHCP server has to answer within the first.
	ipamAddBudget = 10 * time.Second
	ipamBudget    = 5 * time.Second

	CheckBudget  = 20 * time.Second
	StatusBudget = 2 * time.Second
	GCBudget     = 2 * time.Minute // deletes many endpoints in one call

	// Other calls replay a little of the queue, so that it empties also where
	// mknetd is never restarted.
	replayBudget = 200 * time.Millisecond
	replayLimit  = 8

	// stdinSilence is how long standard input may say nothing before its end.
	stdinSilence = 10 * time.Second

	slack = time.Second
)
