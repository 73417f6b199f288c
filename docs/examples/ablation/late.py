"""Throwaway: what groups of features, labels and late decisions gain (CONFIG [EPOCHS OUT] FOLDER)."""
import sys, statistics
from dataclasses import replace
from pathlib import Path
import torch, numpy as np, warnings
warnings.filterwarnings("ignore"); torch.set_num_threads(1)
from pipelines.config import load_config
from pipelines.data.recorded import load_traces
from pipelines.latency.stage import load_profile
from pipelines.train.judging import timed_cases, statics
from selector.train.tuning import replay_setting, tune_lookup_rule, tune_setting, decide
from selector.train.module import SelectorModule
from selector.train.replay import ratio_of_speeds, Replayed
config = load_config(Path(sys.argv[1]), ["train.epochs=3"])
profile = load_profile(config); splits = load_traces(config)
free = replace(profile.at_batch(1), decide={k: 0.0 for k in profile.at_batch(1).decide})
cases = {s: timed_cases(config, splits[s], profile)[0].on(free) for s in ("train","validation","test")}
base = statics([cases["train"]])[0]; rule = tune_lookup_rule(cases["train"], base)
t=cases["test"]; ruled = replay_setting(t, {}, rule)
def walk(timed, action_R, late):
    eff=timed.space.efficiencies(timed.survivals_RS).round().long().numpy(); sec=timed.seconds().numpy()
    act=action_R.numpy(); tok=[];secs=[];steps=[]; begin=0
    for size in timed.texts.size_X.tolist():
        at=0; T=S=0.0; n=0; prev=None
        while at<size:
            a=act[begin+at] if (not late or prev is None) else act[begin+prev]
            got=min(int(eff[begin+at,a]), size-at); T+=got; S+=sec[begin+at,a]; n+=1
            prev=at; at+=int(eff[begin+at,a])
        tok.append(T);secs.append(S);steps.append(n); begin+=size
    return Replayed(torch.tensor(tok).double(),torch.tensor(secs).double(),torch.tensor(steps).double(),torch.zeros(1))
for name in ("rule",):
    d=decide(t,{},rule); 
    r0=walk(t,d.action_R,False); r1=walk(t,d.action_R,True)
    print("rule: now", ratio_of_speeds(r0,ruled,t.texts.source_number_X), "late", ratio_of_speeds(r1,ruled,t.texts.source_number_X))
for seed in (0,1):
    m=SelectorModule.load_from_checkpoint(f"{sys.argv[-1]}/all-{seed}/best.ckpt",map_location="cpu").eval()
    for levels,level in m.ways:
        v=cases["validation"]
        j=tune_setting(v,{l:m.scores(v.texts,l) for l in levels},replace(base,level=level))
        d=decide(t,{l:m.scores(t.texts,l) for l in levels},j.setting)
        r0=walk(t,d.action_R,False); r1=walk(t,d.action_R,True)
        print(seed,level,"now",ratio_of_speeds(r0,ruled,t.texts.source_number_X),"late",ratio_of_speeds(r1,ruled,t.texts.source_number_X),"late/now",ratio_of_speeds(r1,r0,t.texts.source_number_X), flush=True)
