package main

import "testing"

// One test per item of the list; suite.Checks says what each asks.

func Test01_InputsOnlyFromEnvAndStdin(t *testing.T)          { item(t, 1) }
func Test02_ErrorObjectOnStdout(t *testing.T)                { item(t, 2) }
func Test03_ContainerIDPattern(t *testing.T)                 { item(t, 3) }
func Test04_InterfaceNameUsable(t *testing.T)                { item(t, 4) }
func Test05_NetworkNamePattern(t *testing.T)                 { item(t, 5) }
func Test06_AddCreatesInterface(t *testing.T)                { item(t, 6) }
func Test07_AddPrintsResult(t *testing.T)                    { item(t, 7) }
func Test08_AddHandlesPrevResult(t *testing.T)               { item(t, 8) }
func Test09_AddFailsIfInterfaceExists(t *testing.T)          { item(t, 9) }
func Test10_AddNeedsItsParameters(t *testing.T)              { item(t, 10) }
func Test11_DelUndoesAdd(t *testing.T)                       { item(t, 11) }
func Test12_DelWithoutPrevResult(t *testing.T)               { item(t, 12) }
func Test13_DelWhenThingsAreGone(t *testing.T)               { item(t, 13) }
func Test14_DelReleasesWithoutNamespace(t *testing.T)        { item(t, 14) }
func Test15_FailedReleaseIsNoError(t *testing.T)             { item(t, 15) }
func Test16_DelRepeats(t *testing.T)                         { item(t, 16) }
func Test17_DelNamespaceIsOptional(t *testing.T)             { item(t, 17) }
func Test18_CheckUsesPrevResult(t *testing.T)                { item(t, 18) }
func Test19_CheckToleratesLaterPlugins(t *testing.T)         { item(t, 19) }
func Test20_CheckFindsBadInterfaceAddressRoute(t *testing.T) { item(t, 20) }
func Test21_CheckFindsMissingHiddenParts(t *testing.T)       { item(t, 21) }
func Test22_CheckFailsIfUnreachable(t *testing.T)            { item(t, 22) }
func Test23_CheckRightAfterAdd(t *testing.T)                 { item(t, 23) }
func Test24_CheckDelegates(t *testing.T)                     { item(t, 24) }
func Test25_CheckIsSilent(t *testing.T)                      { item(t, 25) }
func Test26_StatusZeroWhenReady(t *testing.T)                { item(t, 26) }
func Test27_StatusFailsWhenNotReady(t *testing.T)            { item(t, 27) }
func Test28_StatusCodes(t *testing.T)                        { item(t, 28) }
func Test29_WorksWithoutStatus(t *testing.T)                 { item(t, 29) }
func Test30_OthersComeDespiteStatus(t *testing.T)            { item(t, 30) }
func Test31_StatusDelegates(t *testing.T)                    { item(t, 31) }
func Test32_StatusWithoutContainer(t *testing.T)             { item(t, 32) }
func Test33_VersionEchoesInput(t *testing.T)                 { item(t, 33) }
func Test34_VersionIsCheap(t *testing.T)                     { item(t, 34) }
func Test35_GCRemovesUnlisted(t *testing.T)                  { item(t, 35) }
func Test36_GCAfterNamespaceIsGone(t *testing.T)             { item(t, 36) }
func Test37_GCGoesOnAndReports(t *testing.T)                 { item(t, 37) }
func Test38_GCForwards(t *testing.T)                         { item(t, 38) }
func Test39_GCIsSilent(t *testing.T)                         { item(t, 39) }
func Test40_GCKeys(t *testing.T)                             { item(t, 40) }
func Test41_ConcurrentContainers(t *testing.T)               { item(t, 41) }
func Test42_DelAfterFailedAdd(t *testing.T)                  { item(t, 42) }
func Test43_DelTakesChainsResult(t *testing.T)               { item(t, 43) }
func Test44_RuntimeConfigIsOptional(t *testing.T)            { item(t, 44) }
func Test45_ToleratesReservedKeys(t *testing.T)              { item(t, 45) }
func Test46_DelegateFoundInPath(t *testing.T)                { item(t, 46) }
func Test47_DelegateGetsEverything(t *testing.T)             { item(t, 47) }
func Test48_DelegateStderrForwarded(t *testing.T)            { item(t, 48) }
func Test49_OtherVerbsRunDelegates(t *testing.T)             { item(t, 49) }
func Test50_FailedDelegateAddIsUndone(t *testing.T)          { item(t, 50) }
func Test51_IPAMResultIsFilled(t *testing.T)                 { item(t, 51) }
func Test52_ResultVersion(t *testing.T)                      { item(t, 52) }
func Test53_InterfacesComplete(t *testing.T)                 { item(t, 53) }
func Test54_IPsComplete(t *testing.T)                        { item(t, 54) }
func Test55_RoutesValid(t *testing.T)                        { item(t, 55) }
func Test56_DNSFromConfig(t *testing.T)                      { item(t, 56) }
func Test57_PrevResultUnchanged(t *testing.T)                { item(t, 57) }
func Test58_ErrorObjectComplete(t *testing.T)                { item(t, 58) }
func Test59_ErrorCodes(t *testing.T)                         { item(t, 59) }
