"""Throwaway: what groups of features, labels and late decisions gain (CONFIG [EPOCHS OUT] FOLDER)."""
import sys, time, json, statistics, random
from dataclasses import replace
from pathlib import Path
import torch, warnings
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
from pipelines.config import load_config
from pipelines.data.recorded import load_traces
from pipelines.latency.stage import load_profile
from pipelines.train.fitting import fitted, module_of
from pipelines.train.judging import timed_cases, statics
from selector.train.tuning import replay_setting, tune_lookup_rule, tune_setting
from selector.train.replay import ratio_of_speeds
import mlflow
config = load_config(Path(sys.argv[1]), ["train.epochs=4"])
profile = load_profile(config)
splits = load_traces(config)
free = replace(profile.at_batch(1), decide={k: 0.0 for k in profile.at_batch(1).decide})
cases = {s: timed_cases(config, splits[s], profile)[0].on(free) for s in ("train","validation","test")}
base = statics([cases["train"]])[0]
rule = tune_lookup_rule(cases["train"], base)
ruled = replay_setting(cases["test"], {}, rule)
texts = splits["train"]; depth = texts.space.depth
acc_R = texts.survivals["naive"][:, :depth].float().sum(1).round().long()
def steps_mask(limit):
    m=torch.zeros(len(acc_R),dtype=torch.bool); begin=0
    for size in texts.size_X.tolist():
        at=0
        while at<size:
            m[begin+at]=True; at+=min(int(acc_R[begin+at]),limit)+1
        begin+=size
    return m
m5=steps_mask(5)
g=torch.Generator().manual_seed(0)
rand=torch.rand(len(acc_R),generator=g)<m5.float().mean()
full=torch.full_like(texts.drafted_R, depth)
zero=torch.zeros_like(full)
cens=torch.where(acc_R>=5, torch.full_like(full,5), full)
variants={
 "dense": full,
 "random positions": torch.where(rand,full,zero),
 "steps of 5, whole labels": torch.where(m5,full,zero),
 "steps of 5, censored": torch.where(m5,cens,zero),
 "dense, censored": cens,
}
print("share of positions", float(m5.float().mean()), flush=True)
gsm=[k for k in set(texts.kind_X)]
for name,d in variants.items():
    rows=[]
    for seed in (0,1):
        cfg=config.model_copy(update={"seed":seed})
        sp=dict(splits); sp["train"]=replace(texts, drafted_R=d)
        module=module_of(cfg,"regressor","drafter",texts)
        with mlflow.start_run(run_name=name) as r:
            module=fitted(cfg,module,sp,cfg.train.verifier,[],Path(f"{sys.argv[-1]}/{name.replace(' ','_')}-{seed}"),r.info.run_id)
        e={}
        for levels,level in module.ways:
            v=cases["validation"]; t=cases["test"]
            j=tune_setting(v,{l: module.scores(v.texts,l) for l in levels},replace(base,level=level))
            rep=replay_setting(t,{l: module.scores(t.texts,l) for l in levels},j.setting)
            e[level+" all"]=ratio_of_speeds(rep,ruled,t.texts.source_number_X).value-1
            for k in sorted(set(t.texts.kind_X)):
                mm=torch.tensor([x==k for x in t.texts.kind_X])
                e[f"{level} {k}"]=float((rep.tokens_X[mm].sum()/rep.seconds_X[mm].sum())/(ruled.tokens_X[mm].sum()/ruled.seconds_X[mm].sum()))-1
        rows.append(e)
    print(name, {k: round(statistics.fmean(r[k] for r in rows),4) for k in rows[0]}, flush=True)
